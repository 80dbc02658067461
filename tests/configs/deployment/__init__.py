"""Tests of the files that deploy Swell: `ray up`, KubeRay, Helm and images."""
