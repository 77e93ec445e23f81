//! Descriptions of checkpoints.

use crate::support::{assert_names, goldens, model, taken, tensor, write_folder};
use half::f16;
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{Weights, inspect};

#[test]
fn a_dense_model_is_described() {
    let inspection = inspect(&Weights::open(model()).unwrap()).unwrap();
    assert_eq!(inspection.architecture.as_deref(), Some("LlamaForCausalLM"));
    assert_eq!((inspection.files.len(), inspection.tensors.len(), inspection.modules.len()), (2, 56, 43));
    assert_eq!((inspection.total_bytes, inspection.parameters), (22030080, 11015040));
    assert_eq!((inspection.bits_per_weight, inspection.findings.as_slice()), (16.0, [].as_slice()));
    let q_proj = inspection.modules.iter().find(|m| m.name == "model.layers.0.self_attn.q_proj").unwrap();
    assert_eq!((q_proj.shape, q_proj.scheme, q_proj.format.as_str()), (Some([384, 384]), "dense", "f16"));
    let json = serde_json::to_value(&inspection).unwrap();
    assert_eq!(json["tensors"][0]["dtype"], "F16");
    assert_eq!(json["modules"][0]["shape"], serde_json::json!([4096, 384]));
    assert!(json["quantization"].is_null());
}

#[test]
fn a_quantised_model_is_described_with_what_is_odd_about_it() {
    let (_, golden) = goldens().into_iter().find(|(name, _)| name == "gptq_w4_g32_act_sym").unwrap();
    let part = |module: &str, from: &str, to: &str| taken(&golden, from, &format!("{module}.{to}"));
    let mut tensors = Vec::new();
    // Module a is as labelled, b holds the other zero points, c lost its scales, lm_head is dense.
    for (module, qzeros) in [("h.0.a", "v1.qzeros"), ("h.0.b", "v2.qzeros"), ("h.0.c", "v1.qzeros")] {
        tensors.extend([
            part(module, "qweight", "qweight"),
            part(module, qzeros, "qzeros"),
            part(module, "g_idx", "g_idx"),
        ]);
        if module != "h.0.c" {
            tensors.push(part(module, "scales", "scales"));
        }
    }
    tensors.push(tensor("lm_head.weight", DType::F16, &[4, 64], &[f16::ONE; 256]));
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"architectures": [], "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32,
        "sym": true, "desc_act": true, "checkpoint_format": "gptq"}}"#;
    write_folder(dir.path(), &tensors, config);
    let inspection = inspect(&Weights::open(dir.path()).unwrap()).unwrap();
    assert_eq!(inspection.architecture, None);
    let formats: Vec<(&str, &str, &str, bool)> =
        inspection.modules.iter().map(|m| (m.name.as_str(), m.scheme, m.format.as_str(), m.act_order)).collect();
    for expected in [
        ("h.0.a", "gptq", "w4a16-g32", true),
        ("h.0.b", "gptq", "w4a16-g32", true),
        ("h.0.c", "gptq", "unreadable", false),
        ("lm_head", "dense", "f16", false),
    ] {
        assert!(formats.contains(&expected), "{expected:?} in {formats:?}");
    }
    let findings: Vec<String> = inspection.findings.iter().map(|f| f.to_string()).collect();
    assert_eq!(findings.len(), 2, "{findings:?}");
    let all = findings.join("\n");
    assert_names(&all, &["h.0.b: the config says gptq", "read as gptq_v2", "h.0.c.scales"]);
    assert_eq!(inspection.parameters, 2 * 128 * 64 + 256);
    let bytes: u64 = inspection.tensors.iter().map(|t| t.bytes).sum();
    assert_eq!(inspection.total_bytes, bytes);
    assert_eq!(inspection.modules.iter().map(|m| m.bytes).sum::<u64>(), bytes);
    let json = serde_json::to_value(&inspection).unwrap();
    assert_eq!((&json["quantization"]["quant_method"], &json["quantization"]["bits"]), (&"gptq".into(), &4.into()));
    assert_eq!(json["quantization"]["version"], "gptq");
}

#[test]
fn a_config_without_quantised_tensors_is_a_finding() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#;
    write_folder(dir.path(), &[tensor("a.weight", DType::F16, &[1, 1], &[f16::ONE])], config);
    let inspection = inspect(&Weights::open(dir.path()).unwrap()).unwrap();
    assert_names(&inspection.findings[0].to_string(), &["declares a quantised model"]);
}

#[test]
fn biases_of_zeros_are_said_once() {
    let (_, golden) = goldens().into_iter().find(|(name, _)| name == "gptq_w4_g32_sym").unwrap();
    let mut tensors = Vec::new();
    for (module, bias) in [("h.0.a", f16::ZERO), ("h.0.b", f16::NEG_ZERO), ("h.0.c", f16::ONE)] {
        for (from, to) in [("qweight", "qweight"), ("v1.qzeros", "qzeros"), ("scales", "scales"), ("g_idx", "g_idx")] {
            tensors.push(taken(&golden, from, &format!("{module}.{to}")));
        }
        tensors.push(tensor(&format!("{module}.bias"), DType::F16, &[64], &[bias; 64]));
    }
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true}}"#;
    write_folder(dir.path(), &tensors, config);
    let findings = inspect(&Weights::open(dir.path()).unwrap()).unwrap().findings;
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_names(&findings[0].to_string(), &["h.0.a.bias: ", "with 1 other", "zero throughout", "read as no bias"]);
}

#[test]
fn a_block_that_lacks_what_the_others_have_is_told_without_an_architecture() {
    let told = |modules: &[&str]| {
        let one = |name: &&str| tensor(&format!("{name}.weight"), DType::F16, &[2, 2], &[f16::ONE; 4]);
        let dir = tempfile::tempdir().unwrap();
        write_folder(dir.path(), &modules.iter().map(one).collect::<Vec<_>>(), "");
        let findings = Weights::open(dir.path()).unwrap().irregular_blocks();
        findings.iter().map(|finding| finding.to_string()).collect::<Vec<_>>()
    };
    let regular = ["h.0.a", "h.0.b", "h.1.a", "h.1.b", "h.2.a", "h.2.b", "head"];
    assert_eq!(told(&regular), [""; 0]);
    assert_eq!(told(&["h.0.a", "h.0.b", "h.1.a", "h.2.a", "h.2.b"]), ["h.1: has no `b`, which the other 2 have"]);
    assert_eq!(told(&["h.0.a", "h.1.a", "h.3.a"]), ["h.2: is not there, but others up to 3 are"]);
    // The dense block before those with experts; and too few blocks to tell what is the rule.
    assert_eq!(told(&["h.0.a", "h.0.dense", "h.1.a", "h.1.experts", "h.2.a", "h.2.experts"]), [""; 0]);
    assert_eq!(told(&["h.0.a", "h.0.b", "h.1.a"]), [""; 0]);
}
