"""Where the rows of tables lie: DRAM, tiers with files below them, slots on a device, copies of hot rows."""
