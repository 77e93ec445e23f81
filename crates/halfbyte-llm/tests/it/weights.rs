//! Layers on their way from a file to memory: joined or not, with biases or without, and with bad numbers in them.

use half::f16;
use halfbyte::cpu::Cpu;
use halfbyte::layout::codes::FpaIntB;
use halfbyte::quantize::{Rtn, WeightOnlyRule, rtn, weight_only};
use halfbyte::{Act, Float, Floats, Format};
use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_checkpoint::{
    Checkpoint, Conversion, DType, Job, LinearWeight, ModuleKind, Quantization, Target, Weights, convert, verify,
    write_dense, write_model,
};
use halfbyte_llm::arch::spec::{LinearSpec, Shape};
use halfbyte_llm::comm::Alone;
use halfbyte_llm::device::cpu::{Projection, Vocabulary};
use halfbyte_llm::load::Loader;
use halfbyte_llm::{Config, Error, LoadOptions, Model, Sampler, Sampling, Session, eval};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

fn llama() -> PathBuf {
    crate::architecture("llama")
}

struct Tensor {
    name: &'static str,
    dtype: DType,
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// Values that f16 holds exactly, of no pattern.
fn tensor(name: &'static str, dtype: DType, shape: &[usize]) -> Tensor {
    let salt = name.len() as u32 + name.bytes().map(u32::from).sum::<u32>();
    let value = |i: usize| ((i as u32 + salt).wrapping_mul(2_654_435_761) >> 22) as f32 / 512.0 - 1.0;
    Tensor { name, dtype, shape: shape.to_vec(), values: (0..shape.iter().product()).map(value).collect() }
}

fn write(dir: &Path, tensors: &[Tensor]) {
    let spec = |t: &Tensor| TensorSpec { name: t.name.to_owned(), dtype: t.dtype, shape: t.shape.clone() };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let mut writer = create(dir, &specs, u64::MAX).unwrap();
    for t in tensors {
        let bytes: Vec<u8> = match t.dtype {
            DType::F16 => t.values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            _ => t.values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        writer.write(t.name, &bytes).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn layers_stored_unlike_give_the_outputs_of_one() {
    const K: usize = 40;
    let dir = tempfile::tempdir().unwrap();
    let layers = [
        (tensor("q.weight", DType::F16, &[24, K]), Some(tensor("q.bias", DType::F16, &[24]))),
        (tensor("k.weight", DType::F16, &[8, K]), None),
        (tensor("v.weight", DType::F32, &[9, K]), Some(tensor("v.bias", DType::F32, &[9]))),
    ];
    let x: Vec<f32> = tensor("x", DType::F32, &[3, K]).values;
    let mut want = vec![Vec::new(); 3];
    for (weight, bias) in &layers {
        for i in 0..weight.shape[0] {
            for (m, want) in want.iter_mut().enumerate() {
                let product = (0..K).map(|j| f64::from(x[m * K + j]) * f64::from(weight.values[i * K + j]));
                want.push(product.sum::<f64>() + bias.as_ref().map_or(0.0, |b| f64::from(b.values[i])));
            }
        }
    }
    let tensors: Vec<Tensor> = layers.into_iter().flat_map(|(weight, bias)| [Some(weight), bias]).flatten().collect();
    write(dir.path(), &tensors);
    let weights = Weights::open(dir.path()).unwrap();
    let layer = |name: &str, n, bias| LinearSpec { name: name.to_owned(), shape: Shape { n, k: K, bias } };
    let names = [layer("q", 24, true), layer("k", 8, false), layer("v", 9, true)];
    let quantized = |format: &str| {
        let format: Format = format.parse().unwrap();
        LoadOptions { act: format.act, quantize: Some((format.weight, Rtn::default())), ..LoadOptions::default() }
    };
    for (options, parts, tolerance) in
        [(LoadOptions::default(), 2, 1e-5), (quantized("w8a16-g8-sf32"), 1, 0.15), (quantized("w8a8-tensor"), 1, 0.3)]
    {
        let mut loader = Loader::new(&weights, options).unwrap();
        let joined = Projection::load(&mut loader, &names).unwrap();
        assert_eq!((joined.parts().len(), joined.n()), (parts, 41));
        assert_eq!(loader.parameters(), 41 * 40 + 24 + 9);
        let mut y = vec![f32::NAN; 3 * 41];
        joined.forward(&Cpu::new(2).unwrap(), &x, 3, &mut y, &mut Vec::new()).unwrap();
        for (got, want) in y.iter().zip(want.iter().flatten()) {
            assert!((f64::from(*got) - want).abs() < tolerance, "{got} for {want}");
        }
    }
    let mut loader = Loader::new(&weights, LoadOptions::default()).unwrap();
    let refused = Projection::load(&mut loader, &[layer("k", 8, true)]).unwrap_err();
    assert!(matches!(&refused, Error::Weight { name, .. } if name == "k.bias"), "{refused}");
    let refused = Projection::load(&mut loader, &[layer("k", 9, false)]).unwrap_err();
    assert!(matches!(&refused, Error::Weight { name, .. } if name == "k"), "{refused}");
    assert!(matches!(Projection::load(&mut loader, &[layer("o", 9, false)]), Err(Error::Checkpoint(_))));
    assert!(matches!(loader.vector("q.bias", 25), Err(Error::Checkpoint(_))));
}

/// A copy of a tiny model in which one weight of a tensor is replaced.
fn spoiled(tensor: &str, value: f16) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(llama().join("config.json"), dir.path().join("config.json")).unwrap();
    let path = dir.path().join("model.safetensors");
    let mut file = std::fs::read(llama().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(llama()).unwrap();
    let bytes = checkpoint.bytes(tensor).unwrap();
    let at = file.windows(bytes.len()).position(|part| part == bytes).unwrap();
    file[at + 20..at + 22].copy_from_slice(&value.to_le_bytes());
    std::fs::write(path, file).unwrap();
    dir
}

#[test]
fn weights_that_are_not_finite_are_named_when_quantized_and_felt_when_not() {
    for value in [f16::NAN, f16::INFINITY] {
        let dir = spoiled("model.layers.1.mlp.up_proj.weight", value);
        let format: Format = "w4a8-g128".parse().unwrap();
        let options =
            LoadOptions { act: Act::A8, quantize: Some((format.weight, Rtn::default())), ..LoadOptions::default() };
        match Model::load(dir.path(), &options) {
            Err(Error::Quantize { name, .. }) => assert_eq!(name, "model.layers.1.mlp.up_proj"),
            other => panic!("{other:?}"),
        }
        let (cpu, model) = (Cpu::new(1).unwrap(), Model::load(dir.path(), &LoadOptions::default()).unwrap());
        let mut session = Session::new(&model, &cpu, 10).unwrap();
        let logits = session.prefill(&[1, 2, 3]).unwrap();
        assert!(logits.iter().all(|l| l.is_nan()));
        let mut sampler = Sampler::new(Sampling::default()).unwrap();
        assert!(matches!(sampler.next(logits), Err(Error::NotFinite(_))));
        let scored = eval::perplexity(&model, &cpu, &[1; 64], 16, &mut |_| ControlFlow::Continue(()));
        assert!(matches!(scored, Err(Error::NotFinite(_))));
    }
}

#[test]
fn a_quantized_embedding_is_read_as_what_its_codes_stand_for() {
    const EMBEDDING: &str = "model.embed_tokens";
    let stdlib = crate::stdlib();
    let cases = [
        (stdlib, Target::Gguf, "w8a16-g32", "model.gguf"),
        (llama(), Target::CompressedTensors, "w4a16-g32-asym", "packed"),
        (llama().with_file_name("llama-tied-mha"), Target::Gptq(None), "w8a16-g64", "gptq"),
    ];
    let cpu = Cpu::new(2).unwrap();
    for (source, target, format, name) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (quantized, dense) = (dir.path().join(name), dir.path().join("dense"));
        let wanted = format.parse::<Format>().unwrap().weight;
        let quantization = Quantization {
            target,
            format: &mut |layer| (layer.name == EMBEDDING).then_some(wanted),
            quantize: &mut |_, weight, format| match weight {
                LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, Rtn::default()),
                LinearWeight::Quantized(q) => Ok(q.clone()),
            },
            dense: &mut |_| None,
            untied: None,
        };
        write_model(Job::new(&Weights::open(&source).unwrap(), &quantized), quantization).unwrap();
        let weights = Weights::open(&quantized).unwrap();
        assert!(matches!(weights.kind(EMBEDDING), Ok(ModuleKind::Quantized(_))), "{name}");
        // f32 holds every product of a code and a scale exactly.
        write_dense(Job::new(&weights, &dense), Float::F32).unwrap();
        let config = Config::from_folder(&source).unwrap();
        let [vectors, expected] = [&weights, &Weights::open(&dense).unwrap()].map(|weights| {
            let mut loader = Loader::new(weights, LoadOptions::default()).unwrap();
            let head = Vocabulary::load(&mut loader, &config.spec).unwrap();
            let (mut x, mut logits) = (vec![0.0; 3 * config.spec.hidden], vec![0.0; 3 * config.spec.vocab]);
            head.embed(&Alone, &[0, 17, config.spec.vocab as u32 - 1], &mut x).unwrap();
            assert!(x.iter().any(|&x| x != 0.0));
            head.logits(&cpu, &Alone, &x, 3, &mut logits).unwrap();
            (x, logits, loader.parameters())
        });
        assert_eq!(vectors.0, expected.0, "{name}");
        assert_eq!(vectors.2, expected.2, "{name}");
        let largest = expected.1.iter().fold(0.0f32, |most, l| most.max(l.abs()));
        for (got, want) in vectors.1.iter().zip(&expected.1) {
            assert!((got - want).abs() <= 1e-5 * largest, "{name}: {got} {want}");
        }
    }
}

/// From Paddle's quantiser (its rule, its layout, its names) to text: every form on the way has the same codes, and the same logits.
#[test]
fn weights_of_paddle_are_the_same_in_every_form_and_run() {
    let stdlib = crate::stdlib();
    let source = Weights::open(&stdlib).unwrap();
    let checkpoint = source.checkpoint();
    let (bits, format) = (4, "w4a16-g64".parse::<Format>().unwrap().weight);
    let (mut specs, mut contents, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    let mut put = |name: String, dtype, shape: &[usize], bytes: Vec<u8>| {
        specs.push(TensorSpec { name, dtype, shape: shape.to_vec() });
        contents.push(bytes);
    };
    for info in checkpoint.tensors() {
        let Some(module) = info.name.strip_suffix("_proj.weight").map(|start| format!("{start}_proj")) else {
            put(info.name.to_owned(), info.dtype, info.shape, checkpoint.bytes(info.name).unwrap().to_vec());
            continue;
        };
        let (&[n, k], w) = (info.shape, checkpoint.floats(info.name).unwrap().to_f32()) else { panic!("a matrix") };
        let transposed: Vec<f32> = (0..k * n).map(|at| w[at % n * k + at / n]).collect();
        let q = weight_only(Floats::from(&transposed), [k, n], format, WeightOnlyRule::Paddle).unwrap();
        let stream = FpaIntB::Interleaved.pack(q.codes(), [n, k], bits).unwrap();
        let groups = q.groups();
        let scale = |at: usize| f16::from_f32(q.scales()[at % n * groups + at / n]).to_le_bytes();
        put(format!("{module}.quant_weight"), DType::I8, &[n / 2, k], stream);
        put(format!("{module}.quant_scale"), DType::F16, &[groups, n], (0..n * groups).flat_map(scale).collect());
        expected.push((module, q));
    }
    assert_eq!(expected.len(), 6 * 7);
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir(path("paddle")).unwrap();
    let mut writer = create(path("paddle"), &specs, u64::MAX).unwrap();
    specs.iter().zip(&contents).for_each(|(spec, bytes)| writer.write(&spec.name, bytes).unwrap());
    writer.finish().unwrap();
    let config = std::fs::read_to_string(stdlib.join("config.json")).unwrap();
    let declared =
        r#"{"quantization_config": {"weight_quantize_algo": "weight_only_int4", "group_size": 64, "arch": 80},"#;
    std::fs::write(path("paddle/config.json"), config.replacen('{', declared, 1)).unwrap();

    let cpu = Cpu::new(2).unwrap();
    let mut logits = Vec::new();
    let forms = [
        ("paddle", None),
        ("fpa_intb", Some(Target::FpaIntB(FpaIntB::Interleaved))),
        ("fpa_intb_sm70", Some(Target::FpaIntB(FpaIntB::RowMajor))),
        ("gptq", Some(Target::Gptq(None))),
        ("again", Some(Target::FpaIntB(FpaIntB::Interleaved))),
    ];
    let mut before = path("paddle");
    for (name, target) in forms {
        if let Some(target) = target {
            let conversion = Conversion { target, bits: None, group: None, channel_scale: None, requantize: false };
            convert(Job::new(&Weights::open(&before).unwrap(), &path(name)), conversion).unwrap();
            let [a, b] = [&before, &path(name)].map(|path| Weights::open(path).unwrap());
            assert!(verify(&a, &b, &mut |_, _, _| true).unwrap().equal(), "{name}");
            before = path(name);
        }
        let weights = Weights::open(path(name)).unwrap();
        for (module, q) in &expected {
            match weights.load_linear(module).unwrap().weight {
                LinearWeight::Quantized(read) => assert!(read == *q, "{name}: {module}"),
                LinearWeight::Dense { .. } => panic!("{name}: {module} is dense"),
            }
        }
        let model = Model::load(&path(name), &LoadOptions::default()).unwrap();
        let mut session = Session::new(&model, &cpu, 10).unwrap();
        logits.push(session.prefill(&[1, 20, 300]).unwrap().to_vec());
    }
    assert!(logits[0].iter().all(|logit| logit.is_finite()) && logits[0].iter().any(|&logit| logit != 0.0));
    assert!(logits.iter().all(|other| *other == logits[0]));
}
