"""Two collectives, and between them rank 0 tells which sockets the processes of this run listen at, from torchrun on."""

import json
import os

import psutil
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    torchrun = psutil.Process(os.getppid())
    listening = []
    for process in (torchrun.parent(), torchrun, *torchrun.children(recursive=True)):
        who = process.environ().get("RANK", "")
        who = f"rank {who}" if who else "torchrun" if process == torchrun else "parent"
        for found in process.net_connections("all"):
            if found.status == psutil.CONN_LISTEN or (found.laddr and isinstance(found.laddr, str)):
                listening.append([who, process.pid, str(found.laddr)])
    print(json.dumps(listening))
dist.all_reduce(torch.ones(1))
