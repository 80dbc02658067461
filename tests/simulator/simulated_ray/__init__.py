"""Ray and its autoscaler on the virtual clock."""
