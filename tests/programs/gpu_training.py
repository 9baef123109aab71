"""Plain PyTorch as it is written for GPUs, with the CPU as the other way: DistributedDataParallel, or FSDP2 on a mesh.

ON_CPU takes the other way, SHARD takes FSDP2; ASK is a line of a program that asks for something more.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

on_gpu = torch.cuda.is_available() and "ON_CPU" not in os.environ
local_rank = int(os.environ["LOCAL_RANK"])
if on_gpu:
    torch.cuda.set_device(local_rank)
    torch.cuda.manual_seed_all(0)
    torch.backends.cudnn.benchmark = True
device = torch.device(f"cuda:{local_rank}" if on_gpu else "cpu")
kind = "cuda" if on_gpu else "cpu"
dist.init_process_group("nccl" if on_gpu else "gloo")

samples = TensorDataset(torch.randn(70, 64), torch.randint(10, (70,)))
training, _ = random_split(samples, [64, 6])
sampler = DistributedSampler(training, num_replicas=2, rank=0)
loader = DataLoader(training, batch_size=8, sampler=sampler, num_workers=2 * on_gpu, pin_memory=on_gpu)

blocks = (layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()))
model = nn.Sequential(*blocks, nn.Linear(64, 10))
if "SHARD" in os.environ:
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("data",))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(model, mesh=mesh)
    model.to(device)
else:
    model = model.cuda() if on_gpu else model
    model = DistributedDataParallel(model, device_ids=[local_rank] if on_gpu else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(kind, enabled="SHARD" not in os.environ)

for images, labels in loader:
    images, labels = images.to(device, non_blocking=True), labels.to(local_rank if on_gpu else "cpu")
    weights = torch.ones(10, device=device)
    optimizer.zero_grad()
    with torch.autocast(kind, dtype=torch.bfloat16, enabled="SHARD" not in os.environ):
        loss = nn.functional.cross_entropy(model(images), labels, weight=weights)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
if on_gpu:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda.synchronize()
    end.record()
    print("ms", start.elapsed_time(end), "held", torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
    torch.cuda.empty_cache()
exec(os.environ.get("ASK", ""))
if dist.get_rank() == 0:
    torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, "training.pt")
dist.destroy_process_group()
