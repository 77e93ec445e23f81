//! What only files hold, on a GPU as on the CPU: GGUF's blocks, embedding and head among them; a head of other bits.

use super::{all_logits, architecture, gpu, on, options, stdlib, worst};
use halfbyte::cpu::Cpu;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, Format};
use halfbyte_checkpoint::gguf::{GgmlType, TensorSpec, Value, create, gguf_name, has_paired_rows, hf_row, pack};
use halfbyte_checkpoint::{Checkpoint, Job, LinearWeight, Quantization, Target, Untied, Weights, write_model};
use halfbyte_llm::{Config, Device, Model, Session};
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

/// A Llama, its matrices rounded to blocks; a tied head has no tensor of its own.
fn write(path: &Path, folder: &Path, tied: bool, type_of: &dyn Fn(&str) -> GgmlType) {
    let config = Config::from_folder(folder).unwrap();
    let (spec, number) = (&config.spec, |n: usize| Value::U32(n as u32));
    let from = Checkpoint::open(folder).unwrap();
    let inner = from.info("model.layers.0.mlp.up_proj.weight").unwrap().shape[0];
    let keys = [
        ("block_count", number(spec.layers.len())),
        ("context_length", number(spec.max_context)),
        ("embedding_length", number(spec.hidden)),
        ("feed_forward_length", number(inner)),
        ("attention.head_count", number(spec.heads.heads)),
        ("attention.head_count_kv", number(spec.heads.kv_heads)),
        ("attention.layer_norm_rms_epsilon", Value::F32(spec.norm.eps)),
        ("rope.freq_base", Value::F32(10_000.0)),
        ("vocab_size", number(spec.vocab)),
    ];
    let mut metadata = vec![("general.architecture".to_owned(), Value::String("llama".to_owned()))];
    metadata.extend(keys.map(|(key, value)| (format!("llama.{key}"), value)));
    let names = from.tensor_names().map(|name| (name.to_owned(), gguf_name(name).unwrap()));
    let names: Vec<(String, String)> = names.filter(|(_, name)| !tied || name != "output.weight").collect();
    let specs = names.iter().map(|(hf, name)| {
        let shape = from.info(hf).unwrap().shape.to_vec();
        TensorSpec { name: name.clone(), ggml_type: type_of(name), shape }
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
    for tied in [false, true] {
        let mut bytes = Vec::new();
        for head in [GgmlType::F16, GgmlType::Q8_0, GgmlType::Q4_1] {
            let path = dir.path().join(format!("{head}-{tied}.gguf"));
            write(&path, &architecture("llama"), tied, &|name| type_of(name, head));
            let model = Model::load(&path, &options(Device::Cpu, None)).unwrap();
            assert!(model.load_times().is_none());
            let want = all_logits(&model, &cpu, &tokens);
            assert!(want.iter().all(|v| v.is_finite()) && want.iter().any(|&v| v != want[0]));
            let Some(gpu) = gpu() else { continue };
            let model = Model::load(&path, &options(on(&gpu, Float::F32), None)).unwrap();
            let got = all_logits(&model, &cpu, &tokens);
            assert!(worst(&got, &want) < 1e-4, "{head}, tied {tied}: {}", worst(&got, &want));
            let times = model.load_times().unwrap();
            let file = std::fs::metadata(&path).unwrap().len();
            // All matrices, as they are in the file, with scales apart and tables of parts.
            assert!(times.sent.bytes > file / 2 && times.sent.bytes < 2 * file, "{} of {file} bytes", times.sent.bytes);
            assert!(times.lanes > 0);
            bytes.push(model.weight_bytes());
        }
        // Embedding and head stay codes: of 8 and 4 bits with their scales, instead of 16.
        let matrices = if tied { 1 } else { 2 };
        for (codes, bits) in bytes.iter().skip(1).zip([8, 4]) {
            let least = matrices * 320 * 128 * (16 - bits - 3) / 8;
            assert!(codes + least <= bytes[0], "{bytes:?}, tied {tied}");
        }
    }
}

/// Token by token, where a GPU may compute all layers in one kernel, which is given the token's vector.
#[test]
fn an_embedding_of_codes_gives_the_logits_of_the_cpu_token_by_token() {
    let Some(gpu) = gpu() else { return };
    let (cpu, dir) = (Cpu::all_threads().unwrap(), tempfile::tempdir().unwrap());
    let tokens: Vec<u32> = (0..60).map(|i| (i * 103 + 12) % 4096).collect();
    for embedding in [GgmlType::Q8_0, GgmlType::Q4_0] {
        let path = dir.path().join(format!("{embedding}.gguf"));
        write(&path, &stdlib(), true, &|name| match name {
            _ if name.contains("norm") => GgmlType::F32,
            "token_embd.weight" => embedding,
            _ => GgmlType::Q4_0,
        });
        let want = all_logits(&Model::load(&path, &options(Device::Cpu, None)).unwrap(), &cpu, &tokens);
        let largest = want.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        let model = Model::load(&path, &options(on(&gpu, Float::F16), None)).unwrap();
        let plans: Vec<_> = model.explain(&cpu).unwrap().into_iter().flat_map(|product| product.plans).collect();
        let named = plans.iter().any(|plan| plan.kernel == "persistent_decode");
        assert_eq!(named, gpu.gpu.caps().arch.is_hopper(), "{embedding}");
        let mut session = Session::new(&model, &cpu, tokens.len()).unwrap();
        for (i, &token) in tokens.iter().enumerate() {
            let error = worst(session.decode(token).unwrap(), &want[i * 4096..][..4096]);
            assert!(error < 1e-2 * largest, "{embedding}, position {i}: {error} of {largest}");
        }
    }
}

/// A head of other bits than the blocks, as files hold it.
#[test]
fn a_quantized_head_of_a_file_gives_the_logits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let (cpu, here) = (Cpu::all_threads().unwrap(), tempfile::tempdir().unwrap());
    let (source, folder) = (Weights::open(stdlib()).unwrap(), here.path().join("out"));
    let [blocks, format] = ["w4a16-g128", "w8a16-g128"].map(|name| name.parse::<Format>().unwrap().weight);
    let quantization = Quantization {
        target: Target::Gptq(None),
        format: &mut |layer| layer.in_block().then_some(blocks),
        quantize: &mut |_, weight, format| match weight {
            LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, Rtn::default()),
            LinearWeight::Quantized(q) => Ok(q.clone()),
        },
        dense: &mut |_| None,
        untied: Some(Untied { embedding: "model.embed_tokens", format }),
    };
    write_model(Job::new(&source, &folder), quantization).unwrap();
    let tokens: Vec<u32> = (0..70).map(|i| (i * 103 + 12) % 4096).collect();
    let logits = |device| all_logits(&Model::load(&folder, &options(device, None)).unwrap(), &cpu, &tokens);
    let far = worst(&logits(on(&gpu, Float::F16)), &logits(Device::Cpu));
    assert!(far < 0.1, "{far}");
}
