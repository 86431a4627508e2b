"""A small table on digits, for tests."""

TINY = """
title = "Accuracy on digits as clients differ more"
system = "fedal"
place = "Table 0"
across = "α"
[[rows]]
name = "FedAL"
run = { method = "fedal" }
published = { "α = 5" = 78, "α = 2" = [74.4, 0.7] }
[[rows]]
name = "Local"
run = { method = "local" }
[[rows]]
name = "Large"
untestable = { small = "it needs what is not here" }
[[columns]]
name = "α = 5"
run = { data = { options = { alpha = 5.0 } } }
[[columns]]
name = "α = 2"
run = { data = { options = { alpha = 2.0 } } }
[[claims]]
text = "FedAL is more accurate than Local."
left = "FedAL @ α = 5"
right = "Local @ α = 5"
[[claims]]
text = "Large is the best."
left = "Large"
right = "FedAL"
[small]
seeds = 2
[small.run]
rounds = 2
models = { pool = ["linear"] }
data = { clients = 3 }
evaluate = { points = 1 }
[paper]
[paper.run]
iterations = 3000
data = { name = "svhn" }
"""
