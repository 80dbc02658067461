"""Pure decisions about the cluster: target size, upgrades, versions, back-off."""
