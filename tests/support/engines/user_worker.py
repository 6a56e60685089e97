"""A worker of a user's own: it has some of PipelineRL's names, by no extension."""

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.support.engines.user_extension import Extension


class Worker(CPUWorker):
    """Has what the extension has."""

    tests_double = Extension.tests_double
    init_actor_update_group = Extension.init_actor_update_group
    receive_weight_update = Extension.receive_weight_update
    close_communicator = Extension.close_communicator
