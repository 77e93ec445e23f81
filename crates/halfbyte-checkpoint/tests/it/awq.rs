//! AWQ modules against files of another program, and against a packer of the tests' own.

mod configs;

use crate::support::{self, Random, Tensor, assert_names, model, quantized, taken, tensor, testdata, write_folder};
use half::f16;
use halfbyte::format::reference::{dequantize, matmul};
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{Checkpoint, Error, Finding, LinearWeight, ModuleKind, Weights, inspect};

pub const LAYOUTS: [&str; 3] = ["gemm", "gemv", "gemv_fast"];

/// The golden files, with their group sizes.
pub fn goldens() -> [(Checkpoint, usize); 3] {
    [("64x32_g32", 32), ("128x64_g64", 64), ("256x64_g128", 128)]
        .map(|(name, group)| (Checkpoint::open(testdata(&format!("awq/awq_w4_{name}.safetensors"))).unwrap(), group))
}

/// A golden module in one of the layouts.
pub fn packed(golden: &Checkpoint, layout: &str) -> Vec<Tensor> {
    let scales = if layout == "gemm" { "scales".to_owned() } else { format!("{layout}.scales") };
    vec![
        taken(golden, &format!("{layout}.qweight"), "m.qweight"),
        taken(golden, &format!("{layout}.qzeros"), "m.qzeros"),
        taken(golden, &scales, "m.scales"),
        taken(golden, "bias", "m.bias"),
    ]
}

pub fn config_of(version: &str, group: usize) -> String {
    format!(
        r#"{{"quantization_config": {{"quant_method": "awq", "bits": 4, "group_size": {group}, "zero_point": true,
        "version": "{version}"}}}}"#
    )
}

fn load(tensors: &[Tensor], config: &str) -> (QTensor, Vec<f32>, Vec<Finding>) {
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), tensors, config);
    let weights = Weights::open(dir.path()).unwrap();
    let Ok(ModuleKind::Quantized(scheme)) = weights.kind("m") else { panic!("expected a quantised module") };
    assert_eq!(scheme.name, "awq");
    let description = (scheme.describe)(&weights, "m").unwrap();
    let loaded = weights.load_linear("m").unwrap();
    let LinearWeight::Quantized(q) = loaded.weight else { panic!("expected a quantised weight") };
    let described = (description.format.codes(), description.shape, description.act_order);
    assert_eq!(described, (Some(q.format()), [q.n(), q.k()], false));
    assert_eq!(inspect(&weights).unwrap().findings, loaded.findings);
    assert!(description.findings.iter().all(|finding| loaded.findings.contains(finding)));
    (q, loaded.bias.unwrap_or_default(), loaded.findings)
}

fn refusal(tensors: &[Tensor], config: &str) -> String {
    let error = support::refusal(tensors, config);
    assert!(
        matches!(error, Error::Malformed { .. } | Error::Missing { .. } | Error::Numbers { .. }),
        "expected the tensors to be refused: {error:?}"
    );
    error.to_string()
}

#[test]
fn files_of_autoawq_are_read_to_their_exact_values_in_every_layout() {
    for (golden, group) in goldens() {
        let [k, n] = golden.info("q").unwrap().shape.to_vec()[..] else { panic!("q is no matrix") };
        let groups = k / group;
        let codes = golden.bytes("q").unwrap();
        let zeros = golden.ints("zeros").unwrap();
        let scales = golden.floats("scales").unwrap().to_f32();
        let expected = golden.floats("gemm.w_dequant_fp16").unwrap().to_f32();
        let x: Vec<f64> = golden.floats("x").unwrap().to_f32().into_iter().map(f64::from).collect();
        let y: &[f64] = &bytemuck::pod_collect_to_vec::<u8, f64>(golden.bytes("y_f64").unwrap());
        for layout in LAYOUTS {
            let context = format!("{layout}, [{n}, {k}], groups of {group}");
            let (q, bias, findings) = load(&packed(&golden, layout), &config_of(layout, group));
            assert_eq!(findings, [], "{context}");
            let format = WeightFormat {
                bits: 4,
                group: Group::Size(group),
                zero: Zero::Integer,
                scale: Float::F16,
                channel_scale: None,
            };
            assert_eq!((q.format(), q.n(), q.k(), q.group_index()), (format, n, k, None), "{context}");
            let mut dense = dequantize(&q);
            for i in 0..n {
                for g in 0..groups {
                    assert_eq!(q.zero_point(i, g), Some(zeros[g * n + i] as u32), "{context}");
                    assert_eq!(q.scales()[i * groups + g], scales[g * n + i], "{context}");
                }
                for j in 0..k {
                    assert_eq!(q.codes()[i * k + j], codes[j * n + i], "{context} at {i}, {j}");
                    let weight = f16::from_f64(dense[i * k + j]);
                    assert_eq!(weight.to_f32(), expected[j * n + i], "{context} at {i}, {j}");
                    dense[i * k + j] = weight.to_f64();
                }
            }
            let product = matmul(&x, &dense, [3, n, k]);
            for (i, (&got, &expected)) in product.value.iter().zip(y).enumerate() {
                let got = got + f64::from(bias[i % n]);
                assert!((got - expected).abs() <= 1e-9 * (1.0 + expected.abs()), "{context}: {got}, not {expected}");
            }
        }
    }
}

#[test]
fn llm_awq_has_a_name_of_its_own_for_zero_points() {
    for (golden, group) in goldens() {
        let (expected, _, _) = load(&packed(&golden, "gemv_fast"), &config_of("gemv_fast", group));
        let mut tensors = packed(&golden, "gemv_fast");
        tensors[1].0 = "m.scaled_zeros".into();
        let config = config_of("gemm", group).replace("\"bits\"", r#""backend": "llm-awq", "bits""#);
        let (q, _, findings) = load(&tensors, &config);
        assert_eq!((q, findings), (expected, vec![]));
    }
}

#[test]
fn tensors_decide_against_the_label_with_a_finding() {
    for (golden, group) in goldens() {
        let (expected, _, _) = load(&packed(&golden, "gemm"), &config_of("gemm", group));
        for layout in LAYOUTS {
            for label in LAYOUTS.into_iter().filter(|&label| label != layout) {
                let (q, _, findings) = load(&packed(&golden, layout), &config_of(label, group));
                assert_eq!(q, expected, "{layout} labelled {label}");
                assert_eq!((findings.len(), findings[0].subject.as_str()), (1, "m"));
                assert_names(&findings[0].text, &[&format!("says {label},"), &format!("read as {layout}")]);
            }
        }
    }
}

#[test]
fn without_a_config_the_shapes_tell_or_nothing_is_read() {
    for (golden, group) in goldens() {
        let (expected, _, _) = load(&packed(&golden, "gemm"), &config_of("gemm", group));
        for layout in LAYOUTS {
            let tensors = packed(&golden, layout);
            if (layout, group) == ("gemv", 64) {
                // [64, 16], [64, 2] and [64, 16] are GPTQ's for 16 outputs and 512 inputs in groups of 8 as well.
                assert_names(&refusal(&tensors, ""), &["`m`", "both GPTQ's and", "gemv"]);
                continue;
            }
            let (q, _, findings) = load(&tensors, "");
            assert_eq!(q, expected, "{layout}, groups of {group}");
            assert_eq!(findings.len(), 1);
            assert_names(&findings[0].text, &["no quantization_config", &format!("AWQ's {layout}")]);
        }
    }
    // 32 inputs: gemv's tensors are gemm's for groups of 1 as well, which a config of groups of 32 rules out.
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let q = random(5, format, [16, 32]);
    let tensors = pack("m", &q, "gemv");
    assert_names(&refusal(&tensors, ""), &["`m`", "gemm or gemv alike"]);
    assert_eq!(load(&tensors, &config_of("gemv", 32)), (q.clone(), vec![], vec![]));
    let (read, _, findings) = load(&tensors, &config_of("gemm", 32));
    assert_eq!((read, findings.len()), (q, 1));
}

/// A tensor of random codes, scales and zero points.
fn random(seed: u64, format: WeightFormat, shape: [usize; 2]) -> QTensor {
    quantized(&mut Random(seed), format, shape, 0..=15, false)
}

/// Packs 4-bit codes with f16 scales, step by step as AutoAWQ's `from_linear` does.
fn pack(prefix: &str, q: &QTensor, layout: &str) -> Vec<Tensor> {
    let (n, k, groups) = (q.n(), q.k(), q.groups());
    let name = |part: &str| format!("{prefix}.{part}");
    let code = |i: usize, j: usize| u32::from(q.codes()[i * k + j]);
    let zero = |i: usize, g: usize| q.zero_point(i, g).unwrap();
    let scale = |i: usize, g: usize| f16::from_f32(q.scales()[i * groups + g]);
    let word = |nibbles: &mut dyn Iterator<Item = u32>| -> i32 {
        nibbles.enumerate().fold(0, |word, (i, nibble)| word | nibble << (4 * i)) as i32
    };
    let multiple = match q.format().group.len(k) {
        0..=32 => 4,
        33..=64 => 2,
        _ => 1,
    };
    let width = groups.div_ceil(8).next_multiple_of(multiple);
    let mut out = Vec::new();
    match layout {
        "gemm" => {
            let order = [0, 2, 4, 6, 1, 3, 5, 7];
            let (mut codes, mut zeros, mut scales) = (vec![], vec![], vec![]);
            for j in 0..k {
                codes.extend((0..n / 8).map(|c| word(&mut order.iter().map(|o| code(8 * c + o, j)))));
            }
            for g in 0..groups {
                zeros.extend((0..n / 8).map(|c| word(&mut order.iter().map(|o| zero(8 * c + o, g)))));
                scales.extend((0..n).map(|i| scale(i, g)));
            }
            out.push(tensor(&name("qweight"), DType::I32, &[k, n / 8], &codes));
            out.push(tensor(&name("qzeros"), DType::I32, &[groups, n / 8], &zeros));
            out.push(tensor(&name("scales"), DType::F16, &[groups, n], &scales));
        }
        "gemv" => {
            let (mut codes, mut zeros, mut scales) = (vec![], vec![], vec![]);
            for i in 0..n {
                codes.extend((0..k / 8).map(|c| word(&mut (8 * c..8 * c + 8).map(|j| code(i, j)))));
                let padded = |g: usize| if g < groups { zero(i, g) } else { 0 };
                zeros.extend((0..width).map(|c| word(&mut (8 * c..8 * c + 8).map(padded))));
                scales.extend((0..8 * width).map(|g| if g < groups { scale(i, g) } else { f16::ZERO }));
            }
            out.push(tensor(&name("qweight"), DType::I32, &[n, k / 8], &codes));
            out.push(tensor(&name("qzeros"), DType::I32, &[n, width], &zeros));
            out.push(tensor(&name("scales"), DType::F16, &[n, 8 * width], &scales));
        }
        "gemv_fast" => {
            // The inputs of a row: pairs of four eights dealt round within 32, then even before odd within 8.
            let inputs: Vec<usize> = (0..k)
                .map(|p| {
                    let dealt = [0, 2, 4, 6, 1, 3, 5, 7][p % 8] + p % 32 / 8 * 8;
                    let (eight, pair, odd) = (dealt % 8 / 2, dealt / 8, dealt % 2);
                    p / 32 * 32 + 8 * eight + 2 * pair + odd
                })
                .collect();
            let mut codes: Vec<i16> = Vec::new();
            for four in 0..n / 4 {
                let stream: Vec<u32> = (0..k / 64)
                    .flat_map(|block| (0..4).flat_map(move |row| (0..64).map(move |p| (row, 64 * block + p))))
                    .map(|(row, p)| code(4 * four + row, inputs[p]))
                    .collect();
                codes.extend(stream.chunks(4).map(|four| word(&mut four.iter().copied()) as i16));
            }
            let (mut zeros, mut scales) = (vec![], vec![]);
            for g in 0..8 * width {
                for i in 0..n {
                    let real = g < groups;
                    let product = |i, g| f16::from_f32(-(scale(i, g).to_f32() * zero(i, g) as f32));
                    zeros.push(if real { product(i, g) } else { f16::ZERO });
                    scales.push(if real { scale(i, g) } else { f16::ZERO });
                }
            }
            out.push(tensor(&name("qweight"), DType::I16, &[n / 4, k], &codes));
            out.push(tensor(&name("qzeros"), DType::F16, &[8 * width, n], &zeros));
            out.push(tensor(&name("scales"), DType::F16, &[8 * width, n], &scales));
        }
        other => panic!("{other}"),
    }
    out
}

#[test]
fn the_packer_of_these_tests_writes_autoawqs_files_bit_by_bit() {
    for (golden, group) in goldens() {
        let (q, _, _) = load(&packed(&golden, "gemm"), &config_of("gemm", group));
        for layout in LAYOUTS {
            assert_eq!(pack("m", &q, layout), packed(&golden, layout)[..3], "{layout}, groups of {group}");
        }
    }
}

#[test]
fn every_size_and_zero_comes_back() {
    let mut seed = 0;
    for zero in [Zero::Symmetric, Zero::Integer] {
        for (shape, size) in [([8, 64], 32), ([136, 192], 64), ([264, 1152], 128), ([24, 1024], 32), ([40, 320], 0)] {
            let group = if size == 0 { Group::Channel } else { Group::Size(size) };
            let format = WeightFormat { bits: 4, group, zero, scale: Float::F16, channel_scale: None };
            seed += 1;
            let q = random(seed, format, shape);
            for layout in LAYOUTS {
                let config = config_of(layout, size).replace("\"group_size\": 0", "\"group_size\": -1");
                let (read, _, findings) = load(&pack("m", &q, layout), &config);
                assert_eq!(read, q, "{layout}, {format:?}, {shape:?}");
                assert_eq!(findings, [], "{layout}, {format:?}, {shape:?}");
            }
        }
    }
}

#[test]
fn a_whole_model_reads_back_to_the_same_tensors() {
    let source = Weights::open(model()).unwrap();
    let format =
        WeightFormat { bits: 4, group: Group::Size(128), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let mut expected: Vec<(String, QTensor)> = Vec::new();
    let mut others: Vec<Tensor> = Vec::new();
    for name in source.checkpoint().tensor_names() {
        match name.strip_suffix(".weight").filter(|prefix| prefix.ends_with("_proj")) {
            None => others.push(taken(source.checkpoint(), name, name)),
            Some(prefix) => {
                let loaded = source.load_linear(prefix).unwrap();
                let LinearWeight::Dense { floats, shape } = loaded.weight else { panic!("{prefix} is not dense") };
                let q = rtn(floats.as_floats(), shape, format, Rtn::default()).unwrap();
                expected.push((prefix.to_owned(), q));
            }
        }
    }
    assert_eq!((expected.len(), others.len()), (42, 14));
    let mut model_config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(model().join("config.json")).unwrap()).unwrap();
    for layout in LAYOUTS {
        let quantization: serde_json::Value = serde_json::from_str(&config_of(layout, 128)).unwrap();
        model_config["quantization_config"] = quantization["quantization_config"].clone();
        let dir = tempfile::tempdir().unwrap();
        let mut tensors = others.clone();
        tensors.extend(expected.iter().flat_map(|(prefix, q)| pack(prefix, q, layout)));
        write_folder(dir.path(), &tensors, &model_config.to_string());

        let weights = Weights::open(dir.path()).unwrap();
        for (prefix, q) in &expected {
            let loaded = weights.load_linear(prefix).unwrap();
            let LinearWeight::Quantized(read) = loaded.weight else { panic!("{prefix} is not quantised") };
            assert!(read == *q, "{prefix} in {layout} is not as it was packed");
            assert_eq!(loaded.findings, [], "{prefix} in {layout}");
        }
        let inspection = inspect(&weights).unwrap();
        assert_eq!(inspection.findings, []);
        let quantized: Vec<_> = inspection.modules.iter().filter(|m| m.scheme == "awq").collect();
        assert_eq!(quantized.len(), 42);
        assert!(quantized.iter().all(|m| m.format == "w4a16-g128-asym"));
        assert_eq!(inspection.parameters, 11_015_040);
        let json = serde_json::to_value(&inspection).unwrap();
        assert_eq!(json["quantization"]["quant_method"], "awq");
        assert_eq!(json["quantization"]["version"], layout);
    }
}

#[test]
fn offsets_that_no_zero_point_gives_stay_floats() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(64), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let q = random(9, format, [16, 128]);
    let config = config_of("gemv_fast", 64);
    let mut tensors = pack("m", &q, "gemv_fast");
    let mut offsets: Vec<f16> = bytemuck::pod_collect_to_vec(&tensors[1].3);
    // Output 3 in group 1: between two zero points; output 4: beyond the last.
    offsets[16 + 3] = f16::from_f32(-2.5 * q.scales()[7]);
    offsets[16 + 4] = f16::from_f32(-17.0 * q.scales()[9]);
    tensors[1] = tensor("m.qzeros", DType::F16, &[16, 16], &offsets);
    let (read, _, findings) = load(&tensors, &config);
    assert_eq!((read.format().zero, read.codes(), read.scales()), (Zero::Float, q.codes(), q.scales()));
    let Zeros::Float(zeros) = read.zeros() else { panic!("expected offsets") };
    for i in 0..16 {
        for g in 0..2 {
            assert_eq!(zeros[i * 2 + g], offsets[g * 16 + i].to_f32());
        }
    }
    assert_eq!(findings.len(), 1);
    assert_names(&findings[0].text, &["2 of 32", "float offsets"]);
    // A group of scale 0 is 0 whatever its zero point, unless its offset is not.
    let mut tensors = pack("m", &q, "gemv_fast");
    let mut scales: Vec<f16> = bytemuck::pod_collect_to_vec(&tensors[2].3);
    let mut offsets: Vec<f16> = bytemuck::pod_collect_to_vec(&tensors[1].3);
    (scales[5], offsets[5]) = (f16::ZERO, f16::ZERO);
    tensors[1] = tensor("m.qzeros", DType::F16, &[16, 16], &offsets);
    tensors[2] = tensor("m.scales", DType::F16, &[16, 16], &scales);
    let (read, _, findings) = load(&tensors, &config);
    assert_eq!((read.zero_point(5, 0), read.zero_point(5, 1), findings), (Some(8), q.zero_point(5, 1), vec![]));
    offsets[5] = f16::ONE;
    tensors[1] = tensor("m.qzeros", DType::F16, &[16, 16], &offsets);
    assert_eq!(load(&tensors, &config).0.format().zero, Zero::Float);
}

#[test]
fn what_the_config_says_beside_the_layout_is_checked() {
    let (golden, group) = goldens().into_iter().next().unwrap();
    let config = config_of("gemm", group);
    let tensors = packed(&golden, "gemm");
    let (expected, _, _) = load(&tensors, &config);
    let (q, _, findings) = load(&tensors, &config.replace("true", "false"));
    assert_eq!(q, expected);
    assert_names(&findings[0].text, &["zero_point false", "other than 8"]);
    let named = config.replace("\"bits\"", r#""modules_to_not_convert": ["x", "m"], "bits""#);
    let (q, _, findings) = load(&tensors, &named);
    assert_eq!(q, expected);
    assert_names(&findings[0].text, &["modules_to_not_convert", "`m`"]);
    // Half a name is no name.
    let other = config.replace("\"bits\"", r#""modules_to_not_convert": ["mm", ""], "bits""#);
    assert_eq!(load(&tensors, &other).2, []);
}

#[test]
fn tensors_that_do_not_fit_are_errors_that_name_them() {
    let ints = |name: &str, shape: &[usize]| tensor(name, DType::I32, shape, &vec![0i32; shape.iter().product()]);
    let shorts = |name: &str, shape: &[usize]| tensor(name, DType::I16, shape, &vec![0i16; shape.iter().product()]);
    let halves = |name: &str, shape: &[usize]| tensor(name, DType::F16, shape, &vec![f16::ONE; shape.iter().product()]);
    let singles = |name: &str, shape: &[usize]| tensor(name, DType::F32, shape, &vec![1f32; shape.iter().product()]);
    // 64 inputs, 32 outputs, groups of 32.
    let (golden, _) = goldens().into_iter().next().unwrap();
    let cases: Vec<(&str, usize, Tensor, &[&str])> = vec![
        ("gemm", 0, ints("m.qweight", &[256]), &["`m.qweight`", "I32 or I16", "[256]"]),
        ("gemm", 0, halves("m.qweight", &[64, 4]), &["`m.qweight`", "I32 or I16", "got F16"]),
        ("gemm", 0, ints("m.qweight", &[0, 4]), &["`m.qweight`", "[0, 4]"]),
        ("gemm", 0, ints("m.qweight", &[64, 5]), &["`m`", "[k, n/8]", "[64, 5]", "[2, 4]", "[2, 32]"]),
        ("gemm", 0, ints("m.qweight", &[65, 4]), &["`m.scales`", "expected 3 groups for 65 inputs", "group_size 32"]),
        ("gemm", 0, ints("m.qweight", &[128, 4]), &["`m.scales`", "expected 4 groups for 128 inputs"]),
        ("gemm", 0, shorts("m.qweight", &[64, 4]), &["`m`", "qweight I16 [64, 4]"]),
        ("gemm", 1, ints("m.qzeros", &[2, 3]), &["`m`", "qzeros I32 [2, 3]"]),
        ("gemm", 1, ints("m.qzeros", &[1, 4]), &["`m`", "qzeros I32 [1, 4]"]),
        ("gemm", 1, halves("m.qzeros", &[2, 32]), &["`m`", "qzeros F16 [2, 32]"]),
        ("gemm", 1, shorts("m.qzeros", &[2, 4]), &["`m.qzeros`", "got I16"]),
        ("gemm", 2, ints("m.scales", &[2, 32]), &["`m.scales`", "F16, BF16 or F32", "got I32"]),
        ("gemm", 2, halves("m.scales", &[2, 4, 8]), &["`m.scales`", "[2, 4, 8]"]),
        ("gemm", 2, halves("m.scales", &[1, 32]), &["`m`", "scales [1, 32]"]),
        ("gemm", 2, tensor("m.scales", DType::F16, &[2, 32], &[f16::NAN; 64]), &["`m`", "finite"]),
        ("gemm", 3, halves("m.bias", &[31]), &["`m.bias`", "[32]", "[31]"]),
        ("gemv", 0, ints("m.qweight", &[31, 8]), &["`m`", "qweight I32 [31, 8]"]),
        ("gemv", 0, ints("m.qweight", &[32, 129]), &["`m.scales`", "33 or more groups for 1032 inputs", "(gemv)"]),
        ("gemv", 1, ints("m.qzeros", &[32, 3]), &["`m`", "qzeros I32 [32, 3]"]),
        (
            "gemv",
            2,
            halves("m.scales", &[32, 32]),
            &["`m.scales`", "padding to 32", "a scale of 1 in group 2 of output 0"],
        ),
        ("gemv_fast", 0, shorts("m.qweight", &[8, 63]), &["`m`", "multiple of 64", "[8, 63]"]),
        ("gemv_fast", 0, shorts("m.qweight", &[7, 64]), &["`m`", "qweight I16 [7, 64]"]),
        ("gemv_fast", 1, ints("m.qzeros", &[32, 32]), &["`m`", "qzeros I32 [32, 32]"]),
        ("gemv_fast", 1, halves("m.qzeros", &[31, 32]), &["`m`", "qzeros F16 [31, 32]"]),
        ("gemv_fast", 1, singles("m.qzeros", &[32, 32]), &["`m.qzeros`", "expected F16 as the scales, got F32"]),
        ("gemv_fast", 2, halves("m.scales", &[32, 32]), &["`m.scales`", "padding to 32"]),
    ];
    for (layout, at, replacement, parts) in cases {
        let mut tensors = packed(&golden, layout);
        tensors[at] = replacement;
        assert_names(&refusal(&tensors, &config_of(layout, 32)), parts);
    }
    for layout in LAYOUTS {
        for (at, name) in [(1, "m.qzeros"), (2, "m.scales")] {
            let mut tensors = packed(&golden, layout);
            tensors.remove(at);
            assert_names(&refusal(&tensors, &config_of(layout, 32)), &[name]);
        }
    }
    // A group size that is not the tensors' own: too few groups, and groups in what would be padding.
    assert_names(&refusal(&packed(&golden, "gemm"), &config_of("gemm", 64)), &["`m.scales`", "group_size 64"]);
    assert_names(&refusal(&packed(&golden, "gemv"), &config_of("gemv", 64)), &["`m.scales`", "expected 1 groups"]);
    assert_names(&refusal(&packed(&golden, "gemv"), &config_of("gemv", 1)), &["`m.scales`", "64 or more groups"]);
}
