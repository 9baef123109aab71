"""A sitecustomize.py, which Python runs at its start, that gives torch another answer on whether there are GPUs."""

SITE = """
import importlib.util, os, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            module.is_available = replace(module.is_available)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


def write_site(folder, replace):
    """Write it; ``replace`` is the source of a function that makes ``torch.cuda.is_available`` from torch's own."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE + replace)
