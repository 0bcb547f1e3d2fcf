"""Plans from measurements: where rows lie, and what a step costs there."""
