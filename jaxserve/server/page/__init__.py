"""The page at ``/``: a chat with the model and a live view of the engine, as static files and the routes to them."""
