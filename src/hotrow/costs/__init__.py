"""What a step costs: work and traffic counted from config and data, and seconds by the figures of a machine."""
