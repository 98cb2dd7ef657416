"""What headrace says about itself: logs, metrics, traces."""
