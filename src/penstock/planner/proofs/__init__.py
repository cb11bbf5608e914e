"""What no plan of a step can beat."""
