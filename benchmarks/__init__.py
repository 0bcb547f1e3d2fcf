"""Measurements that need more than hotrow itself: other libraries, whole models, and the pages made of them."""
