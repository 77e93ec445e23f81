//! GPT-OSS as OpenAI publishes it: experts in MXFP4, in a folder of Hugging Face.

use crate::gguf_read_only::files::{assert_near, logits};
use crate::gguf_read_only::tables::{E2M1, mxfp4};
use crate::tensor_parallel::compare;
use halfbyte_checkpoint::safetensors::{DType, TensorSpec, create};
use halfbyte_checkpoint::{Checkpoint, Weights};
use halfbyte_llm::check::contradictions;
use halfbyte_llm::{Config, LoadOptions, Model};
use std::path::Path;

const EXPERTS: usize = 4;
const HIDDEN: usize = 128;
const INNER: usize = 256;

type Tensor = (String, DType, Vec<usize>, Vec<u8>);

fn floats(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// Codes and scales of rows, as the files have them, and what they stand for.
fn quantized(rows: &[f32]) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let (mut blocks, mut scales, mut values) = (Vec::new(), Vec::new(), Vec::new());
    for group in rows.chunks_exact(32) {
        let (exponent, codes) = mxfp4(group);
        let scale = 2f32.powi(i32::from(exponent) - 127);
        blocks.extend(codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4));
        values.extend(codes.iter().map(|&code| scale * E2M1[usize::from(code)]));
        scales.push(exponent);
    }
    (blocks, scales, values)
}

/// The tiny model with experts in MXFP4, and with the same values in f32 and a module each.
fn models() -> [Vec<Tensor>; 2] {
    let from = Checkpoint::open(crate::architecture("gpt-oss")).unwrap();
    let mut models: [Vec<Tensor>; 2] = Default::default();
    for info in from.tensors().filter(|info| !info.name.contains(".mlp.experts.")) {
        let tensor = (info.name.to_owned(), info.dtype, info.shape.to_vec(), from.data(info.name).unwrap().to_vec());
        models.iter_mut().for_each(|model| model.push(tensor.clone()));
    }
    for layer in 0..2 {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        let values = |name: &str| from.floats(&format!("{prefix}.{name}")).unwrap().to_f32();
        let mut stacks: [[Vec<u8>; 3]; 2] = Default::default();
        for expert in 0..EXPERTS {
            let of = |module: &str| {
                let name = format!("{expert}.{module}");
                (quantized(&values(&format!("{name}.weight"))), values(&format!("{name}.bias")), name)
            };
            let [gate, up, down] = ["gate_proj", "up_proj", "down_proj"].map(of);
            for ((_, _, values), bias, name) in [&gate, &up, &down] {
                let shape = if name.ends_with("down_proj") { [HIDDEN, INNER] } else { [INNER, HIDDEN] };
                let name = format!("{prefix}.{name}");
                models[1].push((format!("{name}.weight"), DType::F32, shape.to_vec(), floats(values)));
                models[1].push((format!("{name}.bias"), DType::F32, vec![shape[0]], floats(bias)));
            }
            // Rows of gate and up in turn.
            let in_turn = |a: &[u8], b: &[u8]| -> Vec<u8> {
                let width = a.len() / INNER;
                a.chunks(width).zip(b.chunks(width)).flat_map(|(a, b)| [a, b].concat()).collect()
            };
            let of_up =
                [in_turn(&gate.0.0, &up.0.0), in_turn(&gate.0.1, &up.0.1), in_turn(&floats(&gate.1), &floats(&up.1))];
            let of_down = [down.0.0, down.0.1, floats(&down.1)];
            for (stack, of_expert) in stacks.iter_mut().zip([of_up, of_down]) {
                stack.iter_mut().zip(of_expert).for_each(|(stack, bytes)| stack.extend(bytes));
            }
        }
        for ((name, rows, columns), stack) in
            [("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)].into_iter().zip(stacks)
        {
            let groups = columns / 32;
            let [blocks, scales, bias] = stack;
            let mut put = |part: &str, dtype, shape: &[usize], bytes| {
                models[0].push((format!("{prefix}.{name}_{part}"), dtype, shape.to_vec(), bytes));
            };
            put("blocks", DType::U8, &[EXPERTS, rows, groups, 16], blocks);
            put("scales", DType::U8, &[EXPERTS, rows, groups], scales);
            put("bias", DType::F32, &[EXPERTS, rows], bias);
        }
    }
    models
}

fn write(dir: &Path, tensors: &[Tensor], packed: bool) {
    let spec =
        |(name, dtype, shape, _): &Tensor| TensorSpec { name: name.clone(), dtype: *dtype, shape: shape.clone() };
    let mut writer = create(dir, &tensors.iter().map(spec).collect::<Vec<_>>(), u64::MAX).unwrap();
    tensors.iter().for_each(|(name, _, _, bytes)| writer.write(name, bytes).unwrap());
    writer.finish().unwrap();
    let mut config = std::fs::read_to_string(crate::architecture("gpt-oss").join("config.json")).unwrap();
    if packed {
        let declared = r#"{"quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn",
            "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"},"#;
        config = config.replacen('{', declared, 1);
    }
    std::fs::write(dir.join("config.json"), config).unwrap();
}

#[test]
fn experts_in_mxfp4_compute_what_their_values_do() {
    let [packed, dense] = models();
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    write(dirs[0].path(), &packed, true);
    write(dirs[1].path(), &dense, false);
    let weights = Weights::open(dirs[0].path()).unwrap();
    let config = Config::from_weights(&weights).unwrap();
    let findings = contradictions(&config, &weights).into_findings();
    assert!(findings.is_empty(), "{findings:?}");
    assert_near("mxfp4", &logits(dirs[0].path()), &logits(dirs[1].path()));
    assert!(compare(dirs[0].path(), &LoadOptions::default(), 1e-4, "mxfp4") >= 1);
}

#[test]
fn a_model_that_lacks_scales_or_has_nan_is_refused_by_name() {
    let [packed, _] = models();
    let told = |tensors: &[Tensor], parts: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), tensors, true);
        let error = Model::load(dir.path(), &LoadOptions::default()).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let at = |end: &str| packed.iter().position(|(name, ..)| name.ends_with(end)).unwrap();
    let mut nan = packed.clone();
    // Expert 2, row 5 of `up`, group 1.
    nan[at("layers.0.mlp.experts.gate_up_proj_scales")].3[2 * 2 * INNER * 4 + 11 * 4 + 1] = 255;
    told(&nan, &["layers.0.mlp.experts.2.up_proj.weight_scales", "NaN (255) in row 5, group 1"]);
    let mut less = packed.clone();
    less.remove(at("layers.1.mlp.experts.down_proj_scales"));
    told(&less, &["layers.1.mlp.experts.down_proj_scales", "found none"]);
    let mut other = packed.clone();
    other[at("layers.1.mlp.experts.down_proj_scales")].2 = vec![EXPERTS, INNER / 32, HIDDEN];
    told(&other, &["layers.1.mlp.experts.down_proj_scales", "expected U8 [4, 128, 8]", "[4, 8, 128]"]);
}
