"""Makes model.safetensors, config.json, hf_quant_config.json: a small Llama that ModelOpt quantised to NVFP4 and exported; and
expected.safetensors: what its functions make of the weights, in f32.

Needs nvidia-modelopt 0.47.0, torch 2.15.0, transformers, safetensors. Run in this folder.
"""

import os

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(20261128)
config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"])
model = LlamaForCausalLM(config).to(torch.bfloat16)
for name, parameter in model.named_parameters():
    if parameter.dim() == 2:
        parameter.data *= torch.logspace(-2, 1, parameter.shape[0])[:, None].to(torch.bfloat16)
tokens = torch.randint(0, 96, (4, 32))
mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(tokens))
export_hf_checkpoint(model, export_dir=".")
for name in ["generation_config.json"]:
    if os.path.exists(name):
        os.remove(name)
tensors = load_file("model.safetensors")
expected = {}
for name, codes in tensors.items():
    if codes.dtype != torch.uint8:
        continue
    module = name.removesuffix(".weight")
    weight = NVFP4QTensor(torch.Size([codes.shape[0], 2 * codes.shape[1]]), torch.float32, codes)
    expected[module] = weight.dequantize(dtype=torch.float32, scale=tensors[module + ".weight_scale"],
                                         double_scale=tensors[module + ".weight_scale_2"], block_sizes={-1: 16})
save_file(expected, "expected.safetensors")
for name in os.listdir("."):
    os.chmod(name, 0o644)
for name, tensor in tensors.items():
    print(name, tensor.dtype, list(tensor.shape))
