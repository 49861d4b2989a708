"""What the control plane knows about itself and the cluster."""
