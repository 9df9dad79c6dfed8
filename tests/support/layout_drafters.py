"""One tiny drafter of each kind and size that layouts tell apart."""

import torch

from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.losses import LossConfig

LOSS = LossConfig(num_steps=3)


COUNTS = torch.ones(64)


DRAFTERS = {
    "eagle3": lambda v: Eagle3.create(v, Eagle3Config(), LOSS, COUNTS),
    "eagle3, draft vocabulary": lambda v: Eagle3.create(
        v, Eagle3Config((1, 8), 40, fc_norm=True), LOSS, COUNTS
    ),
    "eagle1": lambda v: Eagle1.create(v, Eagle1Config(), LOSS),
    "medusa": lambda v: Medusa.create(
        v, MedusaConfig(2, shared_projection=False, draft_vocab_size=40), LOSS, COUNTS
    ),
    "medusa, shared projection": lambda v: Medusa.create(v, MedusaConfig(), LOSS, COUNTS),
}


SCALED = {
    "llama3": {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0,
             "original_max_position_embeddings": 256},
}  # fmt: skip
