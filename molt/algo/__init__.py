# SPDX-License-Identifier: Apache-2.0
"""The algorithm, as functions of numbers and tensors: estimators, corrections, losses.

`estimators` turns rewards into advantages, `corrections` weighs the mismatch of μ and π_old,
`losses` turns both into what is differentiated. Each file ends with the dictionary that the
config's names look up: adding one is a function, an entry there, a literal in the config and a test
with numbers worked out by hand.

Three policies: μ (behavior, the engine that sampled), π_old (trainer, start of the step), π (now).
"""
