"""How students learn: on-policy distillation (opd) and supervised fine-tuning (sft)."""
