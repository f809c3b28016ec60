"""How fast an endpoint may be called: a controller that learns it from headers and refusals."""
