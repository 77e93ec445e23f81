//! The same models in GGUF's terms, as llama.cpp's converter writes them, are the same specs and compute the same bits.

use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte_checkpoint::gguf::{GgmlType, TensorSpec, Value, create, gguf_name, has_paired_rows, hf_row, parse};
use halfbyte_checkpoint::{Checkpoint, FloatData, Weights};
use halfbyte_llm::arch::spec::Positions;
use halfbyte_llm::check::contradictions;
use halfbyte_llm::{Config, LoadOptions, Model, Session};
use std::path::Path;

/// Writes a folder's tensors with metadata of an architecture; q and k in pairs if GGUF has them so.
fn write(name: &str, gguf: &str, paired: bool, more: &[(&str, Value)], path: &Path) {
    write_kept(name, gguf, paired, more, |_| true, path);
}

/// The same of those tensors whose name in the folder is kept.
fn write_kept(name: &str, gguf: &str, paired: bool, more: &[(&str, Value)], kept: fn(&str) -> bool, path: &Path) {
    let config = Config::from_folder(&crate::architecture(name)).unwrap();
    let spec = &config.spec;
    let number = |n: usize| Value::U32(n as u32);
    let Positions::Rope(rope) = &spec.layers[0].attention.positions else { panic!("no rope") };
    let base = rope.frequencies[1].powf(-(spec.heads.head_size as f64) / 2.0);
    let keys = [
        ("block_count", number(spec.layers.len())),
        ("context_length", number(spec.max_context)),
        ("embedding_length", number(spec.hidden)),
        ("feed_forward_length", number(256)),
        ("attention.head_count", number(spec.heads.heads)),
        ("attention.head_count_kv", number(spec.heads.kv_heads)),
        ("attention.key_length", number(spec.heads.head_size)),
        ("attention.value_length", number(spec.heads.head_size)),
        ("attention.layer_norm_rms_epsilon", Value::F32(spec.norm.eps)),
        ("rope.freq_base", Value::F32(base.round() as f32)),
        ("vocab_size", number(spec.vocab)),
    ];
    let keys = keys.into_iter().chain(more.iter().map(|(key, value)| (*key, value.clone())));
    let mut metadata = vec![("general.architecture".to_owned(), Value::String(gguf.to_owned()))];
    metadata.extend(keys.map(|(key, value)| (format!("{gguf}.{key}"), value)));
    let from = Checkpoint::open(crate::architecture(name)).unwrap();
    let infos = from.tensors().filter(|info| kept(info.name));
    let infos: Vec<_> = infos.map(|info| (info.name.to_owned(), info.shape.to_vec())).collect();
    let data = |hf: &str| from.floats(hf).unwrap();
    let spec_of = |(hf, shape): &(String, Vec<usize>)| TensorSpec {
        name: gguf_name(hf).unwrap(),
        ggml_type: match (shape.len(), data(hf).dtype()) {
            (1, _) | (_, Float::F32) => GgmlType::F32,
            (_, Float::F16) => GgmlType::F16,
            (_, Float::BF16) => GgmlType::BF16,
        },
        shape: shape.clone(),
    };
    let specs: Vec<TensorSpec> = infos.iter().map(spec_of).collect();
    let mut writer = create(path, &metadata, &specs).unwrap();
    for ((hf, shape), spec) in infos.iter().zip(&specs) {
        let bytes: Vec<u8> = match (shape.len(), data(hf)) {
            (1, floats) => bytemuck::cast_slice(&floats.to_f32()).to_vec(),
            (_, FloatData::F16(v)) => bytemuck::cast_slice(&v).to_vec(),
            (_, FloatData::BF16(v)) => bytemuck::cast_slice(&v).to_vec(),
            (_, FloatData::F32(v)) => bytemuck::cast_slice(&v).to_vec(),
        };
        let (head_size, row) = (config.spec.heads.head_size, bytes.len() / shape[0]);
        let bytes: Vec<u8> = match paired && has_paired_rows(&spec.name) {
            true => (0..shape[0]).flat_map(|i| &bytes[hf_row(i, head_size) * row..][..row]).copied().collect(),
            false => bytes,
        };
        writer.write(&spec.name, &bytes).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn models_in_one_file_are_the_same_specs_and_bits() {
    let cpu = Cpu::new(2).unwrap();
    let window = [("attention.sliding_window", Value::U32(16))];
    for (name, gguf, paired, more) in [
        ("llama", "llama", true, &[][..]),
        ("mistral-window", "llama", true, &window),
        ("qwen2", "qwen2", false, &[]),
        ("qwen3", "qwen3", false, &[]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        write(name, gguf, paired, more, &path);
        let [of_folder, of_file] = [&crate::architecture(name), &path].map(|path| {
            let weights = Weights::open(path).unwrap();
            Config::from_weights(&weights).unwrap()
        });
        assert_eq!(of_file.architecture, of_folder.architecture);
        assert_eq!(of_file.spec, of_folder.spec, "{name}");
        let logits = [&crate::architecture(name), &path].map(|path| {
            let model = Model::load(path, &LoadOptions::default()).unwrap();
            let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 320).collect();
            let mut session = Session::new(&model, &cpu, 40).unwrap();
            session.prefill(&tokens).unwrap().to_vec()
        });
        assert_eq!(logits[0], logits[1], "{name}");
    }
}

#[test]
fn ranks_compare_rows_that_lie_in_another_order_too() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["one.gguf", "two.gguf"].map(|name| dir.path().join(name));
    write("llama", "llama", true, &[], &paths[0]);
    let mut bytes = std::fs::read(&paths[0]).unwrap();
    let queries = parse(&bytes, &paths[0]).unwrap().tensor("blk.0.attn_q.weight").unwrap().range.clone();
    bytes[queries.start] ^= 1;
    std::fs::write(&paths[1], bytes).unwrap();
    let load = |options: &LoadOptions| Model::load(&paths[options.comm.rank()], options).map(drop);
    for end in crate::tensor_parallel::ranks(2, &LoadOptions::default(), load) {
        assert_eq!(end.unwrap_err().to_string(), "rank 1 has another model than rank 0");
    }
}

/// GGUF files do not say whether there are biases: the tensors do, and half of them are a contradiction.
#[test]
fn biases_on_q_alone_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let but_k_and_v = |name: &str| !name.ends_with("k_proj.bias") && !name.ends_with("v_proj.bias");
    write_kept("qwen2", "qwen2", false, &[], but_k_and_v, &path);
    let weights = Weights::open(&path).unwrap();
    let config = Config::from_weights(&weights).unwrap();
    let findings = contradictions(&config, &weights).into_findings();
    let told: Vec<String> = findings.iter().map(|finding| finding.to_string()).collect();
    for module in ["k_proj", "v_proj"] {
        let text = format!("model.layers.0.self_attn.{module}: has no bias, and has one by the configuration");
        assert!(told.contains(&text), "{text} in {told:?}");
    }
    let error = Model::load(&path, &LoadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("k_proj"), "{error}");
}
