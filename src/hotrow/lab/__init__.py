"""What measures: probes of this machine, and studies, which repeat runs over configs."""
