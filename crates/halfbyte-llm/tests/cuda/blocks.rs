//! GGUF's blocks, embedding and head among them, on a GPU as on the CPU.

use super::{all_logits, architecture, gpu, on, options, worst};
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte_checkpoint::Checkpoint;
use halfbyte_checkpoint::gguf::{GgmlType, TensorSpec, Value, create, gguf_name, has_paired_rows, hf_row, pack};
use halfbyte_llm::{Config, Device, Model};
use std::path::Path;

/// What a tensor of the file is: vectors are singles.
fn type_of(name: &str, head: GgmlType) -> GgmlType {
    match name {
        _ if name.contains("norm") => GgmlType::F32,
        "token_embd.weight" | "output.weight" => head,
        _ if name.contains("attn_k") || name.contains("ffn_up") => GgmlType::Q4_1,
        _ if name.contains("attn_v") => GgmlType::Q8_0,
        _ if name.contains("attn_output") => GgmlType::F16,
        _ => GgmlType::Q4_0,
    }
}

/// The tiny Llama, its matrices rounded to blocks.
fn write(path: &Path, head: GgmlType) {
    let config = Config::from_folder(&architecture("llama")).unwrap();
    let (spec, number) = (&config.spec, |n: usize| Value::U32(n as u32));
    let keys = [
        ("block_count", number(spec.layers.len())),
        ("context_length", number(spec.max_context)),
        ("embedding_length", number(spec.hidden)),
        ("feed_forward_length", number(256)),
        ("attention.head_count", number(spec.heads.heads)),
        ("attention.head_count_kv", number(spec.heads.kv_heads)),
        ("attention.layer_norm_rms_epsilon", Value::F32(spec.norm.eps)),
        ("rope.freq_base", Value::F32(10_000.0)),
        ("vocab_size", number(spec.vocab)),
    ];
    let mut metadata = vec![("general.architecture".to_owned(), Value::String("llama".to_owned()))];
    metadata.extend(keys.map(|(key, value)| (format!("llama.{key}"), value)));
    let from = Checkpoint::open(architecture("llama")).unwrap();
    let names: Vec<(String, String)> =
        from.tensor_names().map(|name| (name.to_owned(), gguf_name(name).unwrap())).collect();
    let specs = names.iter().map(|(hf, name)| {
        let shape = from.info(hf).unwrap().shape.to_vec();
        TensorSpec { name: name.clone(), ggml_type: type_of(name, head), shape }
    });
    let specs: Vec<TensorSpec> = specs.collect();
    let mut writer = create(path, &metadata, &specs).unwrap();
    for ((hf, name), tensor) in names.iter().zip(&specs) {
        let floats = from.floats(hf).unwrap();
        let bytes: Vec<u8> = match (tensor.ggml_type, tensor.shape.as_slice()) {
            (GgmlType::F32, _) => bytemuck::cast_slice(&floats.to_f32()).to_vec(),
            (GgmlType::F16, _) => from.bytes(hf).unwrap().to_vec(),
            (kind, &[n, k]) => {
                let q = rtn(floats.as_floats(), [n, k], kind.weight_format().unwrap(), Rtn::default()).unwrap();
                pack(name, kind, &q).unwrap()
            }
            _ => panic!("{name} is no matrix"),
        };
        let (rows, row) = (tensor.shape[0], bytes.len() / tensor.shape[0]);
        let bytes: Vec<u8> = match has_paired_rows(name) {
            true => (0..rows).flat_map(|i| &bytes[hf_row(i, spec.heads.head_size) * row..][..row]).copied().collect(),
            false => bytes,
        };
        writer.write(name, &bytes).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn blocks_in_every_place_give_the_logits_of_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::all_threads().unwrap();
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 320).collect();
    for head in [GgmlType::Q8_0, GgmlType::Q4_1] {
        let path = dir.path().join(format!("{head}.gguf"));
        write(&path, head);
        let model = Model::load(&path, &options(Device::Cpu, None)).unwrap();
        assert!(model.load_times().is_none());
        let want = all_logits(&model, &cpu, &tokens);
        assert!(want.iter().all(|v| v.is_finite()) && want.iter().any(|&v| v != want[0]));
        let Some(gpu) = gpu() else { continue };
        let model = Model::load(&path, &options(on(&gpu, Float::F32), None)).unwrap();
        let got = all_logits(&model, &cpu, &tokens);
        assert!(worst(&got, &want) < 1e-4, "{head}: {}", worst(&got, &want));
        let times = model.load_times().unwrap();
        let file = std::fs::metadata(&path).unwrap().len();
        // All matrices, as they are in the file, with scales apart and tables of parts.
        assert!(times.sent.bytes > file / 2 && times.sent.bytes < 2 * file, "{} of {file} bytes", times.sent.bytes);
        assert!(times.lanes > 0);
    }
}
