"""The HTTP server: create_app(engine), routes and protocols."""
