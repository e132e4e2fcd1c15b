"""rlx on Ray: classes for `map_batches` of Ray Data, a deployment for Ray Serve, and clusters that ask for a token.

    ds.map_batches(rlx.ray.Embedder, fn_constructor_args=["minilm-l6"], num_cpus=2, batch_size=512,
                   compute=ray.data.ActorPoolStrategy(size=4))

A model takes the threads and the GPU that Ray gave to its actor. `rlx.batch` runs whole jobs on a cluster.
"""

from rlx.ray.cluster import assigned as assigned
from rlx.ray.cluster import check_address as check_address
from rlx.ray.cluster import connect as connect
from rlx.ray.data import Embedder as Embedder
from rlx.ray.data import Generator as Generator
from rlx.ray.serving import deployment as deployment
