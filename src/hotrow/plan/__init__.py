"""What a setup does before it is trained: where its rows lie, and what some real steps of it take."""
