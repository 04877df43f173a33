"""`paceline serve`: a Ray head and a deployment on this machine."""
