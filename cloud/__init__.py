"""What runs beside the target: the websocket server, the scheduler, the engines."""
