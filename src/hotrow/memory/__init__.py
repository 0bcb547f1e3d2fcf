"""Where the rows of tables lie when they are more than memory holds."""
