// interaction
