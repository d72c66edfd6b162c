"""What runs on the device: the draft, the predictor, the planner, the link to the cloud."""
