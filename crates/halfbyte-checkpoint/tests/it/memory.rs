//! Modules whose tensors are in memory are read as those of files.

use crate::gptq::{VERSIONS, all};
use crate::support::{tensor, write_folder};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{Error, LinearWeight, MemoryTensor, Weights};
use serde_json::{Map, Value};

fn in_memory(tensors: Vec<crate::support::Tensor>) -> Vec<MemoryTensor> {
    tensors.into_iter().map(|(name, dtype, shape, bytes)| MemoryTensor { name, dtype, shape, bytes }).collect()
}

#[test]
fn modules_of_memory_are_those_of_files() {
    let goldens = all();
    assert!(!goldens.is_empty());
    for golden in &goldens {
        for (version, qzeros) in VERSIONS {
            let spelled = if version == halfbyte_checkpoint::GptqVersion::V1 { "gptq" } else { "gptq_v2" };
            let (tensors, config) = (golden.tensors(qzeros), golden.config(spelled, golden.sym));
            let folder = tempfile::tempdir().unwrap();
            write_folder(folder.path(), &tensors, &config);
            let from_file = Weights::open(folder.path()).unwrap();
            let said: Map<String, Value> = serde_json::from_str(&config).unwrap();
            let said = said["quantization_config"].as_object();
            let from_memory = Weights::of_tensors("a program", in_memory(tensors), said).unwrap();
            let [a, b] = [&from_file, &from_memory].map(|weights| weights.load_linear("m").unwrap());
            let (LinearWeight::Quantized(a_codes), LinearWeight::Quantized(b_codes)) = (&a.weight, &b.weight) else {
                panic!("{}: no codes", golden.name)
            };
            assert_eq!((a_codes, &a.bias), (b_codes, &b.bias), "{}", golden.name);
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let good = || tensor("m.weight", DType::F32, &[2, 2], &[1f32; 4]);
    let refused = |tensors: Vec<crate::support::Tensor>, config: Option<&Map<String, Value>>| {
        let error = Weights::of_tensors("a program", in_memory(tensors), config).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. } | Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().starts_with("a program"), "{error}");
    };
    assert!(Weights::of_tensors("a program", in_memory(vec![good()]), None).is_ok());
    let mut short = good();
    short.3.pop();
    refused(vec![short], None);
    let mut endless = good();
    endless.2 = vec![usize::MAX, 2];
    refused(vec![endless], None);
    refused(vec![good(), good()], None);
    let unknown: Map<String, Value> = serde_json::from_str(r#"{"quant_method": "none of ours"}"#).unwrap();
    refused(vec![good()], Some(&unknown));
}
