from typing import Any

from triton.experimental.gluon.language._layouts import NVMMASharedLayout as NVMMASharedLayout

def __getattr__(name: str) -> Any: ...
