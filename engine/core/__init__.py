"""The step loop and the values its phases exchange: integers and decisions, no weights and no processes."""
