//! GPTQ modules against files of other programs, and against themselves.

use crate::support::{Random, Tensor, assert_names, goldens, load, quantized, refusal, taken, tensor, testdata};
use half::{bf16, f16};
use halfbyte::format::reference::{dequantize, matmul};
use halfbyte::{Float, Group, QTensor, StoredTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::Checkpoint;
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::scheme::gptq::pack;
use halfbyte_checkpoint::{Error, Finding, GptqVersion};

pub const VERSIONS: [(GptqVersion, &str); 2] = [(GptqVersion::V1, "v1.qzeros"), (GptqVersion::V2, "v2.qzeros")];

/// Settings of a golden file, from its name and its shapes.
pub struct Golden {
    pub name: String,
    pub file: Checkpoint,
    pub bits: u32,
    pub sym: bool,
    act_order: bool,
    per_channel: bool,
    pub n: usize,
    pub k: usize,
}

pub fn all() -> Vec<Golden> {
    let golden = |(name, file): (String, Checkpoint)| {
        let [k, n] = file.info("q").unwrap().shape.to_vec()[..] else { panic!("{name}: q is no matrix") };
        let bits = name["gptq_w".len()..][..1].parse().unwrap();
        let (sym, act_order, per_channel) = (name.contains("_sym"), name.contains("_act"), name.ends_with("_pc"));
        Golden { bits, sym, act_order, per_channel, name, file, n, k }
    };
    goldens().into_iter().map(golden).collect()
}

impl Golden {
    pub fn tensors(&self, qzeros: &str) -> Vec<Tensor> {
        [
            ("qweight", "m.qweight"),
            (qzeros, "m.qzeros"),
            ("scales", "m.scales"),
            ("g_idx", "m.g_idx"),
            ("bias", "m.bias"),
        ]
        .map(|(from, to)| taken(&self.file, from, to))
        .to_vec()
    }

    pub fn config(&self, version: &str, sym: bool) -> String {
        let group = if self.per_channel { -1 } else { 32 };
        format!(
            r#"{{"quantization_config": {{"quant_method": "gptq", "bits": {}, "group_size": {group}, "sym": {sym},
            "desc_act": {}, "checkpoint_format": "{version}"}}}}"#,
            self.bits, self.act_order
        )
    }

    fn load(&self, qzeros: &str, config: &str) -> (QTensor, Vec<f32>, Vec<Finding>) {
        load(&self.tensors(qzeros), config)
    }

    /// The manifest's codes, transposed.
    fn codes(&self) -> Vec<u8> {
        let q = self.file.bytes("q").unwrap();
        (0..self.n).flat_map(|i| (0..self.k).map(move |j| q[j * self.n + i])).collect()
    }
}

#[test]
fn files_of_other_programs_are_read_to_their_exact_values() {
    for golden in all() {
        for (version, qzeros) in VERSIONS {
            let context = format!("{} {}", golden.name, version.name());
            let (q, bias, findings) = golden.load(qzeros, &golden.config(version.name(), golden.sym));
            assert_eq!(findings, [], "{context}");
            assert_eq!([q.n(), q.k()], [golden.n, golden.k], "{context}");
            assert_eq!(q.codes(), golden.codes(), "{context}");
            assert_eq!(q.format().bits, golden.bits, "{context}");
            assert_eq!(q.format().zero, if golden.sym { Zero::Symmetric } else { Zero::Integer }, "{context}");
            let group = if golden.per_channel { Group::Channel } else { Group::Size(32) };
            assert_eq!(q.format().group, group, "{context}");
            assert_eq!(q.group_index().is_some(), golden.act_order, "{context}");
            let zeros = golden.file.ints("zeros").unwrap();
            let scales = golden.file.floats("scales").unwrap().to_f32();
            for i in 0..golden.n {
                for g in 0..q.groups() {
                    assert_eq!(q.zero_point(i, g), Some(zeros[g * golden.n + i] as u32), "{context}");
                    assert_eq!(q.scales()[i * q.groups() + g], scales[g * golden.n + i], "{context}");
                }
            }
            for (j, &g) in golden.file.ints("g_idx").unwrap().iter().enumerate() {
                assert_eq!(q.group_of(j), g as usize, "{context}");
            }

            let dense = dequantize(&q);
            if golden.file.contains("w_dequant_gptqmodel") {
                let expected = golden.file.floats("w_dequant_gptqmodel").unwrap().to_f32();
                for i in 0..golden.n {
                    for j in 0..golden.k {
                        let got = f16::from_f64(dense[i * golden.k + j]).to_f32();
                        assert_eq!(got, expected[j * golden.n + i], "{context} at {i}, {j}");
                    }
                }
            }
            let x: Vec<f64> = golden.file.floats("x").unwrap().to_f32().into_iter().map(f64::from).collect();
            let y = golden.file.floats("y").unwrap().to_f32();
            let product = matmul(&x, &dense, [3, golden.n, golden.k]);
            for (i, (&got, &expected)) in product.value.iter().zip(&y).enumerate() {
                let got = got + f64::from(bias[i % golden.n]);
                let expected = f64::from(expected);
                assert!(
                    (got - expected).abs() <= 1e-5 + 1e-5 * expected.abs(),
                    "{context}: {got}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn files_of_other_programs_are_written_bit_by_bit() {
    for golden in all() {
        for (version, qzeros) in VERSIONS {
            let context = format!("{} {}", golden.name, version.name());
            let (q, _, _) = golden.load(qzeros, &golden.config(version.name(), golden.sym));
            let packed = pack("m", &q, version).unwrap();
            assert_eq!(packed.qweight, *golden.file.ints("qweight").unwrap(), "{context}");
            assert_eq!(packed.qzeros, *golden.file.ints(qzeros).unwrap(), "{context}");
            assert_eq!(packed.g_idx, *golden.file.ints("g_idx").unwrap(), "{context}");
            let scales: &[u8] = bytemuck::cast_slice(&packed.scales);
            assert_eq!(scales, golden.file.bytes("scales").unwrap(), "{context}");
        }
    }
}

#[test]
fn without_a_config_the_shapes_and_the_zero_points_tell() {
    for golden in all() {
        let (expected, _, _) = golden.load("v1.qzeros", &golden.config("gptq", golden.sym));
        let (q, _, findings) = golden.load("v1.qzeros", "");
        assert_eq!(q, expected, "{}", golden.name);
        let texts: String = findings.iter().map(|f| f.text.as_str()).collect();
        assert_eq!(
            texts.contains("no quantization_config of GPTQ's says how zero points are stored"),
            !golden.sym,
            "{texts}"
        );
        assert_eq!(texts.contains("g_idx reorders"), golden.act_order, "{texts}");
        if golden.sym {
            let (q, _, findings) = golden.load("v2.qzeros", "");
            assert_eq!(q, expected, "{}", golden.name);
            let texts: String = findings.iter().map(|f| f.text.as_str()).collect();
            assert_names(&texts, &["no quantization_config", "read as gptq_v2"]);
        }
    }
}

#[test]
fn a_wrong_version_label_is_found_by_symmetric_zero_points_only() {
    for golden in all() {
        for (label, truth, qzeros) in [("gptq", "gptq_v2", "v2.qzeros"), ("gptq_v2", "gptq", "v1.qzeros")] {
            let context = format!("{} labelled {label}", golden.name);
            let (expected, _, _) = golden.load(qzeros, &golden.config(truth, golden.sym));
            let (q, _, findings) = golden.load(qzeros, &golden.config(label, golden.sym));
            if golden.sym {
                assert_eq!(q, expected, "{context}");
                assert_eq!(findings.len(), 1, "{context}");
                assert_eq!(findings[0].subject, "m");
                let stored = if truth == "gptq" { (1 << (golden.bits - 1)) - 1 } else { 1 << (golden.bits - 1) };
                assert_names(
                    &findings[0].text,
                    &[&format!("the config says {label}"), &format!("read as {truth}"), &stored.to_string()],
                );
            } else {
                // Nothing in the data contradicts the label.
                assert_ne!(q, expected, "{context}");
            }
            if golden.sym {
                // A config that says asymmetric is believed, with a note.
                let (q, _, findings) = golden.load(qzeros, &golden.config(label, false));
                assert_ne!(q, expected, "{context}");
                assert_names(&findings[0].text, &["sym false"]);
            }
        }
    }
}

#[test]
fn a_zero_point_of_zero_is_held_by_v2_and_refused_by_v1() {
    let file = Checkpoint::open(testdata("gptq/gptq_w4_zero0_informative.safetensors")).unwrap();
    let tensors =
        [("qweight", "m.qweight"), ("v2.qzeros", "m.qzeros"), ("scales", "m.scales")].map(|(a, b)| taken(&file, a, b));
    let config = r#"{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": false,
        "desc_act": false, "checkpoint_format": "gptq_v2"}}"#;
    let (q, _, findings) = load(&tensors, config);
    assert_eq!(findings, []);
    let zeros = file.ints("zeros").unwrap();
    assert!(zeros.contains(&0));
    for (i, &zero) in zeros.iter().enumerate() {
        assert_eq!(q.zero_point(i, 0), Some(zero as u32));
    }
    let packed = pack("m", &q, GptqVersion::V2).unwrap();
    assert_eq!(packed.qzeros, *file.ints("v2.qzeros").unwrap());
    assert_eq!(packed.qweight, *file.ints("qweight").unwrap());
    let error = pack("model.m", &q, GptqVersion::V1).unwrap_err();
    assert!(matches!(error, Error::Unrepresentable { .. }));
    assert_names(&error.to_string(), &["model.m", "gptq", "1 to 16", "got 0"]);
}

/// A tensor of random codes, scales and zero points.
pub fn random(seed: u64, format: WeightFormat, shape: [usize; 2], act_order: bool) -> QTensor {
    quantized(&mut Random(seed), format, shape, 1..=format.max_code() as usize, act_order)
}

pub fn tensors_of(q: &QTensor, version: GptqVersion) -> Vec<Tensor> {
    let packed = pack("m", q, version).unwrap();
    let (n, k, groups, bits) = (q.n(), q.k(), q.groups(), q.format().bits as usize);
    vec![
        tensor("m.qweight", DType::I32, &[k * bits / 32, n], &packed.qweight),
        tensor("m.qzeros", DType::I32, &[groups, n * bits / 32], &packed.qzeros),
        tensor("m.scales", DType::F16, &[groups, n], &packed.scales),
        tensor("m.g_idx", DType::I32, &[k], &packed.g_idx),
    ]
}

fn config_of(q: &QTensor, version: GptqVersion) -> String {
    let group = match q.format().group {
        Group::Size(g) => g as i64,
        _ => -1,
    };
    format!(
        r#"{{"quantization_config": {{"quant_method": "gptq", "bits": {}, "group_size": {group}, "sym": {},
        "desc_act": {}, "checkpoint_format": "{}"}}}}"#,
        q.format().bits,
        q.format().zero == Zero::Symmetric,
        q.group_index().is_some(),
        version.name()
    )
}

#[test]
fn what_is_written_is_read_again() {
    let mut cases = 0;
    for bits in [2, 3, 4, 8] {
        for zero in [Zero::Symmetric, Zero::Integer] {
            // 96 columns: whole groups, a shorter last group, one longer than the row.
            for group in
                [Group::Channel, Group::Size(16), Group::Size(32), Group::Size(40), Group::Size(96), Group::Size(128)]
            {
                for act_order in [false, true] {
                    for (version, _) in VERSIONS {
                        let format = WeightFormat { bits, group, zero, scale: Float::F16, channel_scale: None };
                        let q = random(cases, format, [64, 96], act_order && group.count(96) > 1);
                        let (again, _, findings) = load(&tensors_of(&q, version), &config_of(&q, version));
                        assert_eq!(again, q, "{format:?}, {version:?}");
                        assert_eq!(findings, [], "{format:?}, {version:?}");
                        cases += 1;
                    }
                }
            }
        }
    }
    assert_eq!(cases, 4 * 2 * 6 * 2 * 2);
}

#[test]
fn scales_of_one_value_for_the_whole_tensor_are_repeated() {
    let format =
        WeightFormat { bits: 4, group: Group::Tensor, zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
    let q = QTensor::new(format, [32, 64], vec![3; 32 * 64], vec![0.25; 32], Zeros::Symmetric, None).unwrap();
    let (again, _, _) = load(&tensors_of(&q, GptqVersion::V1), &config_of(&q, GptqVersion::V1));
    assert_eq!(again.format().group, Group::Channel);
    assert_eq!((again.codes(), again.scales()), (q.codes(), q.scales()));
}

#[test]
fn what_the_files_cannot_hold_is_refused_with_a_reason() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
    let new = |format: WeightFormat, [n, k]: [usize; 2], scale: f32, zeros: Zeros| {
        let groups = format.group.count(k);
        QTensor::new(format, [n, k], vec![0; n * k], vec![scale; n * groups], zeros, None).unwrap()
    };
    let [float, integer] = [Zero::Float, Zero::Integer].map(|zero| WeightFormat { zero, ..format });
    let whole = random(5, format, [32, 64], false);
    let half_groups = StoredTensor::from(&whole).part(&[0..16, 16..32], &[0..16, 32..48]).unwrap();
    let cases = [
        (new(float, [32, 32], 1.0, Zeros::Float(vec![0.5; 32])), "float offsets"),
        (new(format, [32, 32], 0.1, Zeros::Symmetric), "not exact"),
        (new(format, [32, 32], 1e6, Zeros::Symmetric), "not exact"),
        (new(format, [32, 40], 1.0, Zeros::Symmetric), "multiples of 32, got 40 and 32"),
        (new(format, [40, 32], 1.0, Zeros::Symmetric), "multiples of 32, got 32 and 40"),
        (new(format, [0, 32], 1.0, Zeros::Symmetric), "multiples of 32"),
        (new(integer, [32, 32], 1.0, Zeros::Integer(vec![16; 32])), "got 16"),
        (half_groups, "groups are full, and 2 share 32 columns"),
    ];
    for (q, reason) in cases {
        let error = pack("a.b", &q, GptqVersion::V2).unwrap_err();
        assert!(matches!(error, Error::Unrepresentable { .. }), "{error}");
        assert_names(&error.to_string(), &["a.b", "gptq", reason]);
    }
    // Stored as 15, which is read as 16 again.
    let q = new(integer, [32, 32], 1.0, Zeros::Integer(vec![16; 32]));
    let (again, _, findings) = load(&tensors_of(&q, GptqVersion::V1), &config_of(&q, GptqVersion::V1));
    assert_eq!(again.zero_point(0, 0), Some(16));
    assert_names(&findings[0].text, &["32 zero points are stored as 15, read as 16"]);
}

#[test]
fn scales_may_be_of_any_float_type() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
    let q = random(7, format, [32, 64], false);
    let scales = pack("m", &q, GptqVersion::V1).unwrap().scales;
    let as_bf16: Vec<bf16> = scales.iter().map(|s| bf16::from_f32(s.to_f32())).collect();
    let as_f32: Vec<f32> = scales.iter().map(|s| s.to_f32() + 1e-7).collect();
    let mut tensors = tensors_of(&q, GptqVersion::V1);
    tensors[2] = tensor("m.scales", DType::BF16, &[2, 32], &as_bf16);
    let (read, _, _) = load(&tensors, &config_of(&q, GptqVersion::V1));
    assert_eq!((read.format().scale, read.scales()[1]), (Float::BF16, as_bf16[32].to_f32()));
    tensors[2] = tensor("m.scales", DType::F32, &[2, 32], &as_f32);
    let (read, _, _) = load(&tensors, &config_of(&q, GptqVersion::V1));
    assert_eq!((read.format().scale, read.scales()[1]), (Float::F32, as_f32[32]));
}

#[test]
fn group_indices_are_judged_by_their_data() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
    let plain = random(3, format, [32, 64], false);
    let reordered = random(3, format, [32, 64], true);
    let tensors = tensors_of(&plain, GptqVersion::V1);
    let plain_config = config_of(&plain, GptqVersion::V1);
    let act_config = config_of(&reordered, GptqVersion::V1);

    // Missing: in order, unless the config says that the order was another.
    let without = &tensors[..3];
    let (read, _, findings) = load(without, &plain_config);
    assert_eq!(read, plain);
    assert_names(&findings[0].text, &["g_idx is missing"]);
    assert_names(&refusal(without, &act_config), &["m.g_idx", "desc_act"]);
    let (read, _, _) = load(without, &act_config.replace("\"sym\"", "\"static_groups\": true, \"sym\""));
    assert_eq!(read, plain);

    // Trivial although the config says otherwise, and the other way round.
    let (read, _, findings) = load(&tensors, &act_config);
    assert_eq!((read.group_index(), findings), (None, vec![]));
    let (read, _, findings) = load(&tensors_of(&reordered, GptqVersion::V1), &plain_config);
    assert_eq!(read, reordered);
    assert_names(&findings[0].text, &["desc_act false", "g_idx was followed"]);

    // One group has no order to lose, whatever the config says.
    let channel = random(4, WeightFormat { group: Group::Channel, ..format }, [32, 64], false);
    let says_order = config_of(&channel, GptqVersion::V1).replace("\"desc_act\": false", "\"desc_act\": true");
    for parts in [&tensors_of(&channel, GptqVersion::V1)[..], &tensors_of(&channel, GptqVersion::V1)[..3]] {
        let (read, _, findings) = load(parts, &says_order);
        assert_eq!((&read, findings), (&channel, vec![]));
    }

    // Zero throughout: never filled in.
    let mut zero = tensors.clone();
    zero[3] = tensor("m.g_idx", DType::I32, &[64], &[0i32; 64]);
    let (read, _, findings) = load(&zero, &plain_config);
    assert_eq!(read, plain);
    assert_names(&findings[0].text, &["0 throughout"]);
    assert_names(&refusal(&zero, &act_config), &["m.g_idx", "0 throughout"]);
}

#[test]
fn tensors_that_do_not_fit_each_other_are_errors_that_name_them() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let q = random(5, format, [32, 64], false);
    let good = tensors_of(&q, GptqVersion::V1);
    let config = config_of(&q, GptqVersion::V1);
    let ints = |name: &str, shape: &[usize]| tensor(name, DType::I32, shape, &vec![0i32; shape.iter().product()]);
    let halves = |name: &str, shape: &[usize]| tensor(name, DType::F16, shape, &vec![f16::ONE; shape.iter().product()]);
    let mut index = vec![0i32; 64];
    let mut wrong_index = |value: i32| {
        index[9] = value;
        tensor("m.g_idx", DType::I32, &[64], &index)
    };
    let cases: Vec<(usize, Tensor, &[&str])> = vec![
        (0, ints("m.qweight", &[256]), &["`m.qweight`", "matrix of I32"]),
        (0, halves("m.qweight", &[8, 32]), &["`m.qweight`", "got F16"]),
        (0, ints("m.qweight", &[8, 24]), &["`m.scales`", "expected [groups, 24]"]),
        (0, ints("m.qweight", &[0, 32]), &["`m.scales`", "none of them 0"]),
        (0, ints("m.qweight", &[7, 32]), &["`m.g_idx`", "expected shape [56]"]),
        (0, ints("m.qweight", &[16, 32]), &["`m.g_idx`", "expected shape [128]"]),
        (1, ints("m.qzeros", &[2, 5]), &["`m.qzeros`", "[2, 32·4/32]", "[2, 5]"]),
        (1, ints("m.qzeros", &[2, 2]), &["`m.qzeros`", "[2, 32·4/32]", "[2, 2]"]),
        (1, ints("m.qzeros", &[3, 4]), &["`m.qzeros`", "[3, 4]"]),
        (2, halves("m.scales", &[1, 32]), &["`m.qzeros`", "expected [1,"]),
        (2, halves("m.scales", &[2, 31]), &["`m.scales`", "is this GPTQ?"]),
        (2, halves("m.scales", &[64]), &["`m.scales`", "got [64]"]),
        (2, ints("m.scales", &[2, 32]), &["`m.scales`", "F16, BF16 or F32"]),
        (2, tensor("m.scales", DType::F16, &[2, 32], &[f16::INFINITY; 64]), &["`m`", "finite"]),
        (2, tensor("m.scales", DType::F16, &[2, 32], &[f16::NAN; 64]), &["`m`", "finite"]),
        (3, ints("m.g_idx", &[63]), &["`m.g_idx`", "expected shape [64]"]),
        (3, ints("m.g_idx", &[1, 64]), &["`m.g_idx`", "[1, 64]"]),
        (3, halves("m.g_idx", &[64]), &["`m.g_idx`", "expected I32"]),
        (3, wrong_index(2), &["`m.g_idx`", "from 0 to 1, got 2 at 9"]),
        (3, wrong_index(-1), &["`m.g_idx`", "got -1 at 9"]),
    ];
    for (at, replacement, parts) in cases {
        let mut tensors = good.clone();
        tensors[at] = replacement;
        let text = refusal(&tensors, &config);
        assert_names(&text, parts);
    }
    let other_bits = config.replace("\"bits\": 4", "\"bits\": 8");
    assert_names(&refusal(&good, &other_bits), &["`m.qzeros`", "32·8/32"]);
    assert_names(
        &refusal(&good, &config.replace("32, \"sym\"", "-1, \"sym\"")),
        &["`m.scales`", "group_size -1", "[1, 32]"],
    );
    assert_names(
        &refusal(&good, &config.replace("32, \"sym\"", "16, \"sym\"")),
        &["`m.scales`", "group_size 16", "[4, 32]"],
    );
    for missing in [1, 2] {
        let mut tensors = good.clone();
        let (name, ..) = tensors.remove(missing);
        assert_names(&refusal(&tensors, &config), &[&name]);
    }
    let mut both = good.clone();
    both.push(halves("m.weight", &[32, 64]));
    assert_names(&refusal(&both, &config), &["`m`", "weight", "qweight", "got both"]);
    let mut long_bias = good.clone();
    long_bias.push(halves("m.bias", &[33]));
    assert_names(&refusal(&long_bias, &config), &["`m.bias`", "[32]", "[33]"]);
}

#[test]
fn oddities_of_files_in_the_wild_are_read() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
    let q = random(11, format, [32, 64], false);
    let config = config_of(&q, GptqVersion::V1);
    // A bias that is zero throughout is none.
    let mut tensors = tensors_of(&q, GptqVersion::V1);
    tensors.push(tensor("m.bias", DType::F16, &[32], &[f16::ZERO; 32]));
    let (read, bias, _) = load(&tensors, &config);
    assert_eq!((read, bias), (q.clone(), vec![]));
    // Missing zero points are the middle where the config says so, and an error where it does not.
    tensors.remove(1);
    let (read, _, findings) = load(&tensors, &config);
    assert_eq!(read, q);
    assert_names(&findings[0].text, &["qzeros is missing"]);
    assert_names(&refusal(&tensors, &config.replace("\"sym\": true", "\"sym\": false")), &["m.qzeros"]);
    // Modules of their own settings: the shapes tell.
    let own = random(12, WeightFormat { bits: 8, group: Group::Size(16), ..format }, [32, 64], false);
    let dynamic = config.replace("\"sym\"", r#""dynamic": {"+:.*m": {"bits": 8, "group_size": 16}}, "sym""#);
    let (read, _, _) = load(&tensors_of(&own, GptqVersion::V1), &dynamic);
    assert_eq!(read, own);
    // A config that says symmetric and zero points that are not.
    let asymmetric = random(13, WeightFormat { zero: Zero::Integer, ..format }, [32, 64], false);
    let (read, _, findings) = load(&tensors_of(&asymmetric, GptqVersion::V1), &config);
    assert_eq!(read, asymmetric);
    assert_names(&findings[0].text, &["says sym", "other than 8"]);
    // Outputs and inputs that are no multiples of 32, where the words still come out even.
    let small = [
        tensor("m.qweight", DType::I32, &[3, 8], &(0..24i32).map(|i| i * 0x01234567).collect::<Vec<_>>()),
        tensor("m.qzeros", DType::I32, &[1, 1], &[0x77777777i32]),
        tensor("m.scales", DType::F16, &[1, 8], &[f16::ONE; 8]),
    ];
    let (read, _, _) = load(&small, "");
    assert_eq!([read.n(), read.k()], [8, 24]);
    assert_eq!(read.codes()[24], 7, "lowest nibble of the word in row 0 and column 1");
}
