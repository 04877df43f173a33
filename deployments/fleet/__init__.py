"""What runs inside Serve's own processes: the request router and the autoscaling policy."""
