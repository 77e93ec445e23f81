//! Layouts of fpA_intB kernels in files: streams of Paddle under its names and TensorRT-LLM's; there and back; labels that lie.

use crate::support::{
    Random, Tensor, assert_names, format, listing, quantized, same, taken, tensor, testdata, text_of, write_folder,
    write_layers,
};
use half::f16;
use halfbyte::format::reference::dequantize;
use halfbyte::layout::codes::FpaIntB;
use halfbyte::{Cpu, Float, Group, Linear, QTensor, Weight, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{
    Checkpoint, Conversion, GptqVersion, Hint, Job, LinearWeight, StoredWeight, Target, Weights, convert, inspect,
};
use std::path::Path;

const LAYOUTS: [FpaIntB; 2] = [FpaIntB::Interleaved, FpaIntB::RowMajor];
const LAYERS: [&str; 2] = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"];

fn read(weights: &Weights, module: &str) -> QTensor {
    match weights.load_linear(module).unwrap().weight {
        LinearWeight::Quantized(q) => q,
        LinearWeight::Dense { .. } => panic!("{module} is dense"),
    }
}

/// Tensors that Paddle's quantiser made, which the library's tests have too.
fn paddle(name: &str) -> Checkpoint {
    let folder = testdata("").join("../../halfbyte/testdata/paddle_weight_quantize");
    Checkpoint::open(folder.join(format!("{name}.safetensors"))).unwrap()
}

/// The codes `[k, n]` of a golden as unsigned ones `[n, k]`.
fn unsigned(file: &Checkpoint, name: &str, bits: u32) -> Vec<u8> {
    let &[k, n] = file.info(name).unwrap().shape else { panic!("{name} is no matrix") };
    let codes = file.bytes(name).unwrap();
    (0..n * k).map(|at| codes[at % k * n + at / k].wrapping_add(1 << (bits - 1))).collect()
}

#[test]
fn every_stream_of_paddle_is_read_to_its_codes_under_both_names() {
    let mut streams = 0;
    for name in
        ["wq_64x16_fp16", "wq_64x16_bf16", "wq_128x64_fp16", "wq_128x64_bf16", "wq_192x48_fp16", "wq_256x32_fp16"]
    {
        let file = paddle(name);
        let &[k, n] = file.info("w").unwrap().shape else { panic!("w is no matrix") };
        for (part, bits, algorithm) in
            [("int8", 8, "weight_only_int8"), ("int4", 4, "weight_only_int4"), ("llm_int8", 8, "llm.int8")]
        {
            for (groups, size) in [("pc", -1i64), ("g64", 64), ("g128", 128)] {
                let of = |what: &str| format!("{part}.{groups}.{what}");
                let archs: &[u32] = if part == "llm_int8" { &[80] } else { &FpaIntB::ARCHS };
                for &arch in archs {
                    let out = match part {
                        "llm_int8" => of("out"),
                        _ => of(if arch == 70 { "sm70.out" } else { "sm80.out" }),
                    };
                    if !file.contains(&out) {
                        continue;
                    }
                    let dir = tempfile::tempdir().unwrap();
                    let tensors = [taken(&file, &out, "m.quant_weight"), taken(&file, &of("scale"), "m.quant_scale")];
                    let config = format!(
                        r#"{{"quantization_config": {{"weight_quantize_algo": "{algorithm}", "group_size": {size}, "arch": {arch}}}}}"#
                    );
                    write_folder(dir.path(), &tensors, &config);
                    let weights = Weights::open(dir.path()).unwrap();
                    let q = read(&weights, "m");
                    assert_eq!(q.codes(), unsigned(&file, &of("q_rowmajor"), bits), "{name} {out} sm_{arch}");
                    let scales = file.floats(&of("scale")).unwrap().to_f32();
                    let groups = q.groups();
                    let stored = |at: usize| scales[at % groups * n + at / groups];
                    assert!((0..n * groups).all(|at| q.scales()[at] == stored(at)), "{name} {out}");
                    assert_eq!(inspect(&weights).unwrap().findings, [], "{name} {out}");
                    streams += 1;

                    // The same bytes as TensorRT-LLM has them.
                    if part == "llm_int8" || arch >= 90 {
                        continue;
                    }
                    let grouped = size != -1;
                    let (_, dtype, _, bytes) = taken(&file, &out, "");
                    let width = n * bits as usize / 8;
                    let scale = if grouped { "m.weights_scaling_factor" } else { "m.per_channel_scale" };
                    let scale = taken(&file, &of("scale"), scale);
                    let weight: Tensor = match grouped {
                        false => ("m.weight".into(), dtype, vec![k, width], bytes),
                        true => ("m.weight".into(), scale.1, vec![k, width / 2], bytes),
                    };
                    let algorithm = format!("W{bits}A16{}", if grouped { "_GPTQ" } else { "" });
                    let size = if grouped { size } else { 128 };
                    let config =
                        format!(r#"{{"quantization": {{"quant_algo": "{algorithm}", "group_size": {size}}}}}"#);
                    let dir = tempfile::tempdir().unwrap();
                    write_folder(dir.path(), &[weight, scale], &config);
                    let text = text_of(Weights::open(dir.path()).unwrap().load_linear("m"));
                    assert_names(&text, &["`m`", "--arch"]);
                    let weights = Weights::open_with(dir.path(), Hint { arch: Some(arch), group: None }).unwrap();
                    assert_eq!(read(&weights, "m"), q, "{name} {out}");
                    assert_eq!(inspect(&weights).unwrap().findings, []);
                }
            }
        }
    }
    assert_eq!(streams, 6 * (2 * (3 * 7 + 1) + 3));
}

/// Weights multiply straight from the stream of a file.
#[test]
fn products_of_streams_lie_within_the_bound_of_their_numbers() {
    let cpu = Cpu::all_threads().unwrap();
    for shape in ["1x128x64", "3x256x48", "4x192x32"] {
        for dtype in ["fp16", "bf16"] {
            let file =
                Checkpoint::open(testdata(&format!("weight_only_linear/wol_{shape}_{dtype}.safetensors"))).unwrap();
            let (&[m, k], &[_, n]) = (file.info("x").unwrap().shape, file.info("w").unwrap().shape) else {
                panic!("matrices")
            };
            for bits in [4usize, 8] {
                for (groups, size) in [("pc", -1), ("g64", 64), ("g128", 128)] {
                    let of = |what: &str| format!("int{bits}.{groups}.{what}");
                    let dir = tempfile::tempdir().unwrap();
                    let bytes = file.bytes(&of("sm80_bytes")).unwrap();
                    let tensors = [
                        tensor("m.quant_weight", DType::I8, &[n * bits / 8, k], bytes),
                        taken(&file, &of("scale"), "m.quant_scale"),
                        taken(&file, "bias", "m.bias"),
                    ];
                    let config = format!(
                        r#"{{"quantization_config": {{"quant_method": "fpa_intb", "quant_algo": "weight_only_int{bits}",
                        "arch": 80, "group_size": {size}}}}}"#
                    );
                    write_folder(dir.path(), &tensors, &config);
                    let weights = Weights::open(dir.path()).unwrap();
                    let stored = weights.stored_linear("m").unwrap();
                    let StoredWeight::Quantized(weight) = &stored.weight else { panic!("dense") };
                    let bias = stored.bias.unwrap();
                    let linear = Linear::new(Weight::Stored(&[weight], halfbyte::Act::A16)).unwrap();
                    let linear = linear.with_bias(bias.clone()).unwrap();
                    let x = file.floats("x").unwrap();
                    let mut y = vec![0f32; m * n];
                    linear.forward(&cpu, x.as_floats(), m, &mut y).unwrap();
                    let dense = dequantize(&read(&weights, "m"));
                    let expected: Vec<f64> = file
                        .bytes(&of("y_f64"))
                        .unwrap()
                        .as_chunks::<8>()
                        .0
                        .iter()
                        .map(|v| f64::from_le_bytes(*v))
                        .collect();
                    let bound = linear.bound(&cpu, m, x.as_floats().dtype(), Float::F32).unwrap();
                    for r in 0..m {
                        for i in 0..n {
                            let term = |j: usize| f64::from(x.as_floats().get(r * k + j)) * dense[i * k + j];
                            let magnitude: f64 = f64::from(bias[i].abs()) + (0..k).map(|j| term(j).abs()).sum::<f64>();
                            let far = (f64::from(y[r * n + i]) - expected[r * n + i]).abs();
                            assert!(far <= bound.allowed(magnitude), "{shape} {dtype} {} at {r}, {i}: {far}", of(""));
                        }
                    }
                }
            }
        }
    }
}

/// A tensor of every code, with zero points between these.
fn random(seed: u64, format: WeightFormat, shape: [usize; 2], points: std::ops::RangeInclusive<usize>) -> QTensor {
    quantized(&mut Random(seed), format, shape, points, false)
}

/// Writes a model of these layers and a dense one.
fn write(dir: &Path, layers: &[QTensor], target: Target) -> halfbyte_checkpoint::Result<()> {
    let tensors: Vec<Tensor> = LAYERS
        .iter()
        .zip(layers)
        .map(|(name, q)| (name, [q.n(), q.k()]))
        .map(|(name, [n, k])| tensor(&format!("{name}.weight"), DType::F16, &[n, k], &vec![f16::ONE; n * k]))
        .chain([tensor("model.layers.1.mlp.up_proj.weight", DType::F16, &[2, 3], &[f16::ONE; 6])])
        .collect();
    write_layers(dir, &tensors, &LAYERS.into_iter().zip(layers).collect::<Vec<_>>(), target)
}

fn change(from: &Path, to: &Path, target: Target) -> halfbyte_checkpoint::Result<()> {
    let conversion = Conversion { target, bits: None, group: None, channel_scale: None, requantize: false };
    convert(Job::new(&Weights::open(from)?, to), conversion).map(|_| ())
}

#[test]
fn what_is_written_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    for (i, name) in
        ["w4a16", "w8a16", "w4a16-g64", "w4a16-g128-sbf16", "w8a16-g128", "w4a16-g128-asym", "w8a16-g64-asym-sbf16"]
            .into_iter()
            .enumerate()
    {
        for layout in LAYOUTS {
            let weight = format(name);
            let layers = [[48, 128], [112, 256]].map(|shape| random(i as u64, weight, shape, 0..=15));
            let path = dir.path().join(format!("{name}-{layout:?}"));
            write(&path, &layers, Target::FpaIntB(layout)).unwrap();
            let weights = Weights::open(&path).unwrap();
            for (layer, want) in LAYERS.iter().zip(&layers) {
                assert!(read(&weights, layer) == *want, "{name} {layout:?}: {layer}");
            }
            let inspection = inspect(&weights).unwrap();
            assert_eq!(inspection.findings, [], "{name} {layout:?}");
            assert_eq!(weights.values(|_, _| true).unwrap(), [], "{name} {layout:?}");
            let module = inspection.modules.iter().find(|module| module.name == LAYERS[1]).unwrap();
            assert_eq!((module.scheme, module.shape, module.format.as_str()), ("fpa_intb", Some([112, 256]), name));
            // The same model from the same model is the same file; the other layout has the same numbers.
            let again = path.with_extension("again");
            change(&path, &again, Target::FpaIntB(layout)).unwrap();
            for file in listing(&path) {
                assert!(
                    std::fs::read(path.join(&file)).unwrap() == std::fs::read(again.join(&file)).unwrap(),
                    "{file}"
                );
            }
            let ours = path.with_extension("ours");
            change(&path, &ours, Target::Native).unwrap();
            assert!(same(&path, &ours), "{name} {layout:?}");
        }
        let [a, b] = LAYOUTS.map(|layout| dir.path().join(format!("{name}-{layout:?}")));
        assert!(same(&a, &b), "{name}");
    }
}

#[test]
fn other_forms_become_it_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let this = Target::FpaIntB(FpaIntB::Interleaved);
    for (i, (name, target)) in [
        ("w4a16-g128", Target::Gptq(None)),
        ("w8a16", Target::Gptq(None)),
        ("w4a16-g64-asym", Target::Gptq(Some(GptqVersion::V2))),
        ("w4a16-g128-asym", Target::Awq),
        ("w8a16-g128", Target::CompressedTensors),
    ]
    .into_iter()
    .enumerate()
    {
        let (from, to, back) = (path(&format!("from{i}")), path(&format!("to{i}")), path(&format!("back{i}")));
        let layers = [[64, 128], [96, 256]].map(|shape| random(i as u64 + 50, format(name), shape, 1..=15));
        write(&from, &layers, target).unwrap();
        change(&from, &to, this).unwrap();
        assert!(same(&from, &to), "{name}");
        change(&to, &back, target).unwrap();
        for (layer, want) in LAYERS.iter().zip(&layers) {
            assert!(read(&Weights::open(&to).unwrap(), layer) == *want, "{name}: {layer}");
            assert!(read(&Weights::open(&back).unwrap(), layer) == *want, "{name}: {layer}");
        }
    }
    // Fewer bits grow without loss.
    let three = [random(9, format("w3a16-g128"), [64, 128], 0..=0)];
    write(&path("three"), &three, Target::Gptq(None)).unwrap();
    change(&path("three"), &path("four"), this).unwrap();
    assert!(same(&path("three"), &path("four")));
    assert_eq!(read(&Weights::open(path("four")).unwrap(), LAYERS[0]).format().bits, 4);
}

#[test]
fn what_it_cannot_hold_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let this = Target::FpaIntB(FpaIntB::Interleaved);
    let refused = |name: &str, q: QTensor| {
        let from = dir.path().join(name);
        write(&from, &[q], Target::Native).unwrap();
        let to = from.with_extension("to");
        let text = text_of(change(&from, &to, this));
        assert!(!to.exists(), "{name}");
        text
    };
    let symmetric = |name: &str, shape| random(1, format(name), shape, 8..=8);
    assert_names(&refused("k", symmetric("w4a16", [32, 96])), &["up_proj", "inputs of 64", "96"]);
    assert_names(&refused("n", symmetric("w4a16", [24, 64])), &["up_proj", "multiple of 16", "24"]);
    assert_names(&refused("f32", symmetric("w4a16-sf32", [16, 64])), &["up_proj", "f16"]);
    // One scale an output has no zeros beside it.
    assert_names(&refused("asym", random(1, format("w4a16-asym"), [16, 64], 3..=7)), &["up_proj", "codes of 4 bits"]);
    let q = symmetric("w4a16-g64", [16, 128]);
    let index = (0..128).map(|j| j % 2).collect();
    let act_order =
        QTensor::new(q.format(), [16, 128], q.codes().to_vec(), q.scales().to_vec(), Zeros::Symmetric, Some(index));
    assert_names(&refused("order", act_order.unwrap()), &["up_proj", "no act-order"]);
    // A zero beyond the scale's type.
    let format = format("w4a16-g64-asym");
    let large = QTensor::new(format, [16, 64], vec![0; 1024], vec![65504.0; 16], Zeros::Integer(vec![0; 16]), None);
    assert_names(&refused("large", large.unwrap()), &["up_proj", "65504"]);
}

#[test]
fn labels_are_held_against_the_tensors() {
    let q = random(3, format("w4a16-g64"), [16, 128], 0..=0);
    let bytes = FpaIntB::Interleaved.pack(q.codes(), [16, 128], 4).unwrap();
    let scales: Vec<f16> = (0..32).map(|at| f16::from_f32(q.scales()[at % 16 * 2 + at / 16])).collect();
    let weight = tensor("m.weight", DType::I8, &[128, 8], &bytes);
    let factors = tensor("m.weights_scaling_factor", DType::F16, &[2, 16], &scales);
    let open = |tensors: &[Tensor], config: &str, hint: Hint| {
        let dir = tempfile::tempdir().unwrap();
        write_folder(dir.path(), tensors, config);
        let weights = Weights::open_with(dir.path(), hint)?;
        weights.load_linear("m").map(|loaded| match loaded.weight {
            LinearWeight::Quantized(q) => (q, loaded.findings),
            LinearWeight::Dense { .. } => panic!("dense"),
        })
    };
    let ours = |fields: &str| {
        format!(r#"{{"quantization_config": {{"quant_method": "fpa_intb", "quant_algo": "W4A16_GPTQ"{fields}}}}}"#)
    };
    let all = [weight.clone(), factors.clone()];
    let (none, arch) = (Hint::default(), Hint { arch: Some(80), group: None });
    let found = open(&all, &ours(r#", "arch": 86, "group_size": 64"#), none).unwrap();
    assert_eq!(found, (q.clone(), vec![]));
    // Without a config the caller and the shapes tell.
    assert_eq!(open(&all, "", arch).unwrap(), (q.clone(), vec![]));
    // What a config says is not overruled.
    let volta = Hint { arch: Some(70), group: None };
    assert_eq!(open(&all, &ours(r#", "arch": 80"#), volta).unwrap().0, q);
    assert_ne!(open(&all, "", volta).unwrap().0, q);
    let refusal = |tensors: &[Tensor], config: &str, hint| text_of(open(tensors, config, hint));
    assert_names(&refusal(&all, "", none), &["`m`", "which architecture", "--arch"]);
    assert_names(&refusal(&all, &ours(r#", "arch": 90"#), none), &["sm_90", "not read"]);
    assert_names(&refusal(&all, &ours(r#", "arch": 61"#), none), &["arch", "61"]);
    assert_names(&refusal(&all, &ours(r#", "arch": 80, "group_size": 128"#), none), &["[1, 16]", "group_size 128"]);
    assert_names(&refusal(&all, r#"{"quantization": {"quant_algo": "FP8"}}"#, arch), &["fp8", "not read"]);
    let (_, findings) = open(&all, &ours(r#", "arch": 80"#).replace("W4A16_GPTQ", "W8A16_GPTQ"), none).unwrap();
    assert_eq!(findings.len(), 1);
    assert_names(&findings[0].text, &["says 8 bits", "hold 4"]);
    let other = |part: &str| tensor(&format!("m.{part}"), DType::F16, &[16], &[f16::ONE; 16]);
    let with = |part: &str| [weight.clone(), factors.clone(), other(part)];
    assert_names(&refusal(&with("per_channel_scale"), "", arch), &["`per_channel_scale`", "both"]);
    assert_names(&refusal(&with("prequant_scaling_factor"), "", arch), &["prequant_scaling_factor", "not read"]);
    assert_names(&refusal(&with("zero"), "", arch), &["m.zero", "[2, 16]", "[16]"]);
    let narrow = tensor("m.weight", DType::I8, &[128, 7], &bytes[..896]);
    assert_names(&refusal(&[narrow, factors.clone()], "", arch), &["m.weight", "[128, 7]"]);
    let ragged = tensor("m.weights_scaling_factor", DType::F16, &[3, 16], &[f16::ONE; 48]);
    assert_names(&refusal(&[weight.clone(), ragged], "", arch), &["divides the 128 inputs"]);
    let short = tensor("m.weight", DType::I8, &[32, 8], &bytes[..256]);
    let one = tensor("m.weights_scaling_factor", DType::F16, &[1, 16], &[f16::ONE; 16]);
    assert_names(&refusal(&[short, one], "", arch), &["`m`", "multiple of 64", "32"]);

    // Modules that the config leaves out, with a wildcard.
    let dir = tempfile::tempdir().unwrap();
    let named = |name: &str| {
        [(&weight, "weight"), (&factors, "weights_scaling_factor")]
            .map(|(t, part)| (format!("{name}.{part}"), t.1, t.2.clone(), t.3.clone()))
    };
    let config = ours(r#", "arch": 80, "exclude_modules": ["lm_head", "*.router"]"#);
    let tensors: Vec<Tensor> = [named("layers.0.mlp"), named("layers.0.mlp.router")].into_iter().flatten().collect();
    write_folder(dir.path(), &tensors, &config);
    let findings = inspect(&Weights::open(dir.path()).unwrap()).unwrap().findings;
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_names(&findings[0].to_string(), &["layers.0.mlp.router", "exclude_modules has `*.router`"]);
}

/// Zeros that no zero point makes become offsets, with a word.
#[test]
fn zeros_of_no_zero_point_are_offsets() {
    let (n, k) = (16, 64);
    let bytes = FpaIntB::Interleaved.pack(&vec![3; n * k], [n, k], 4).unwrap();
    let halfs = |value: f32| vec![f16::from_f32(value); n];
    let dir = tempfile::tempdir().unwrap();
    let tensors = [
        tensor("m.weight", DType::I8, &[k, 8], &bytes),
        tensor("m.weights_scaling_factor", DType::F16, &[1, n], &halfs(0.5)),
        tensor("m.zero", DType::F16, &[1, n], &halfs(0.3)),
    ];
    write_folder(dir.path(), &tensors, "");
    let weights = Weights::open_with(dir.path(), Hint { arch: Some(80), group: None }).unwrap();
    let loaded = weights.load_linear("m").unwrap();
    assert_names(&loaded.findings[0].text, &["float offsets"]);
    let LinearWeight::Quantized(q) = loaded.weight else { panic!("dense") };
    assert_eq!((q.format().zero, q.format().scale, q.format().group), (Zero::Float, Float::F32, Group::Channel));
    let expected = 0.5 * (3.0 - 8.0) + f64::from(f16::from_f32(0.3).to_f32());
    assert!(dequantize(&q).iter().all(|&w| w == expected));
}
