"""The command line: each verb is a library call and the printing of its result."""
