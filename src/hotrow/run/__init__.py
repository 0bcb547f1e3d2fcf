"""A training run: set up, trained step by step, saved, resumed and recorded in its folder."""
