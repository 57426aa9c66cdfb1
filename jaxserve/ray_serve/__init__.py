"""N replicas of an engine behind one OpenAI endpoint, on Ray Serve: ``serve run jaxserve.ray_serve:build model=…``.

Needs the ``ray`` extra. A request passes Serve's HTTP proxy, the Ingress (which knows what each replica has cached, and
repeats what a dying replica had not answered), and one EngineReplica, which runs the whole application of
``jaxserve serve``: there is one implementation of every protocol. Nothing here imports Ray when it is imported.
"""

from jaxserve.ray_serve.application import build, build_application

__all__ = ["build", "build_application"]
