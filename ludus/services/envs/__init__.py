"""Environment service: environments over HTTP and WebSocket."""
