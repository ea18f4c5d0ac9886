"""How a model becomes stages: where it is cut, what travels between the parts, and how each is called."""
