//! Names of modules in configs: whatever characters they have, each is named alone and is found again.

use crate::support::{Tensor, tensor, write_folder};
use half::f16;
use halfbyte::Format;
use halfbyte::quantize::{Rtn, SymmetricScale, rtn};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{Job, LinearWeight, ModuleKind, Quantization, Target, Weights, inspect, write_model};

/// What stands behind the number of a layer, and the format of such a module; None: dense.
const MODULES: [(&str, Option<&str>); 8] = [
    ("ü", Some("w8a16-g32")),
    ("日本", Some("w8a16-g32")),
    ("a\nb", Some("w8a16-g32")),
    ("a<b>#&~-/ (c)[d]{e}|^$.*+?\\,:;=!@%\"'`", Some("w8a16-g32")),
    ("dense_é", None),
    ("m", Some("w4a16-g32")),
    ("mü", Some("w4a16-g32")),
    ("m_日", Some("w4a16-g32")),
];

#[test]
fn names_of_any_characters_are_found_by_the_expressions_that_are_written_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let (dense, shape) = (dir.path().join("dense"), [32, 64]);
    std::fs::create_dir(&dense).unwrap();
    let full = |name: &str| format!("layers.0.{name}");
    let values: Vec<f16> = (0..shape[0] * shape[1]).map(|i| f16::from_f32((i % 17) as f32 - 8.0)).collect();
    let tensors: Vec<Tensor> = MODULES
        .iter()
        .map(|(name, _)| tensor(&format!("{}.weight", full(name)), DType::F16, &shape, &values))
        .collect();
    write_folder(&dense, &tensors, "{}");
    let source = Weights::open(&dense).unwrap();
    for target in [Target::Gptq(None), Target::CompressedTensors, Target::Native] {
        let quantized = dir.path().join(target.name());
        let quantization = Quantization {
            target,
            format: &mut |module| {
                let (_, format) = MODULES.iter().find(|(name, _)| full(name) == module.name).unwrap();
                format.map(|format| format.parse::<Format>().unwrap().weight)
            },
            quantize: &mut |_, weight, format| {
                let LinearWeight::Dense { floats, shape } = weight else { panic!("not dense") };
                rtn(floats.as_floats(), *shape, format, Rtn { symmetric: SymmetricScale::Narrow, search: false })
            },
            dense: &mut |_| None,
            untied: None,
        };
        write_model(Job::new(&source, &quantized), quantization).unwrap();
        let read = Weights::open(&quantized).unwrap();
        assert_eq!(inspect(&read).unwrap().findings, [], "{target:?}");
        for (name, format) in MODULES {
            let kind = read.kind(&full(name)).unwrap();
            assert_eq!(matches!(kind, ModuleKind::Quantized(_)), format.is_some(), "{target:?} {name:?}");
            assert_eq!(read.load_linear(&full(name)).unwrap().findings, [], "{target:?} {name:?}");
        }
    }
}
