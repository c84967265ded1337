"""A timeline of two ranks of which one takes four times as long: `mpirun -np 2 python straggler.py FOLDER`."""

import sys
import time

import torch

import pala

model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with pala.Gossip(model, total_steps=100, trace=sys.argv[1]) as gossip:
    while gossip.goes_on:
        time.sleep(0.4 if gossip.rank == 1 else 0.1)  # in place of data and a larger model
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gossip.after_update(steps=1)
