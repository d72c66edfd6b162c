"""What both ends agree on: messages, the speculation tree, the choice of tokens, the session. No sockets, models or clock."""
