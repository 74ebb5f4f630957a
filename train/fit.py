"""From minutes to epochs: how many passes over the pictures fit into a time, all other work included.

epochs, said = fit_epochs(learner, held_images, held_labels, seconds=480.0)
"""

import time

from torch import Tensor

from train.learner import Learner

_WARM_UP, _STEPS, _LONGEST_SECONDS = 3, 20, 10.0  # of the steps that are timed, some patches or all
_AFTER = 3  # evaluations as long as that of the held-out pictures: the test set, and opening it


def fit_epochs(
    learner: Learner, held_images: Tensor, held_labels: Tensor, seconds: float
) -> tuple[float, str]:
    """(epochs, a sentence that says what was measured). The learner is left as it was.

    Every process calls it, and all get one answer. At least one step comes out, however little time is left.
    """
    config, workers = learner.config, learner.workers
    began, saved, rates = time.perf_counter(), learner.tensors(), {}
    for progress in (0.0, 1.0):  # with some of the patches, and with all
        for step in range(_WARM_UP):
            learner.step(step, progress).item()
        count, since = 0, time.perf_counter()
        while count < _STEPS and workers.agree(time.perf_counter() - since)[0] < _LONGEST_SECONDS:
            learner.step(count, progress).item()
            count += 1
        rates[progress] = learner.batch * count / (time.perf_counter() - since)
    learner.load(saved)

    some, since = min(len(held_images), 2048), time.perf_counter()
    evaluating = 0.0
    if some:
        learner.evaluate(held_images[:some], held_labels[:some])
        evaluating = (time.perf_counter() - since) * len(held_images) / some
    seconds -= time.perf_counter() - began + evaluating * (config.evaluations + _AFTER)

    full = 1 - config.full_from if learner.kept_patches(0) else 1.0
    seconds_per_epoch = (
        learner.batch * learner.steps_per_epoch * (full / rates[1.0] + (1 - full) / rates[0.0])
    )
    steps = workers.agree(max(1.0, seconds / seconds_per_epoch * learner.steps_per_epoch // 1))[0]
    epochs = steps / learner.steps_per_epoch
    with_all = f", {rates[1.0]:,.0f} with all patches" if full < 1 else ""
    said = (
        f"Measured {rates[0.0]:,.0f} images/s{with_all}: {epochs:.4g} epochs fit into the time that is left"
    )
    return epochs, said
