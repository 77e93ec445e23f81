//! Whole folders.

use super::*;

#[test]
fn a_whole_model_reads_back_module_by_module() {
    let source = Weights::open(model()).unwrap();
    let format =
        WeightFormat { bits: 4, group: Group::Size(128), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let mut expected = Vec::new();
    let mut tensors = Vec::new();
    let modules = linears(&source).unwrap();
    for info in source.checkpoint().tensors() {
        let module = modules.iter().find(|module| module.in_block() && info.name == format!("{}.weight", module.name));
        let Some(module) = module else {
            tensors.push(taken(source.checkpoint(), info.name, info.name));
            continue;
        };
        let floats = source.checkpoint().floats(info.name).unwrap();
        let q = rtn(floats.as_floats(), module.shape, format, Rtn::default()).unwrap();
        tensors.extend(pack(module.name, &q, false));
        expected.push((module.name, q));
    }
    assert!(expected.len() > 10);
    let dir = tempfile::tempdir().unwrap();
    let packed = dir.path().join("packed");
    std::fs::create_dir(&packed).unwrap();
    let text = std::fs::read_to_string(model().join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let settings = FOUR_BITS.replace("32", "128");
    let declared: serde_json::Value = serde_json::from_str(&self::config(&settings)).unwrap();
    config["quantization_config"] = declared["quantization_config"].clone();
    write_folder(&packed, &tensors, &config.to_string());
    std::fs::copy(model().join("tokenizer.json"), packed.join("tokenizer.json")).unwrap();

    let weights = Weights::open(&packed).unwrap();
    for (name, q) in &expected {
        let loaded = weights.load_linear(name).unwrap();
        assert_eq!(loaded.findings, [], "{name}");
        let LinearWeight::Quantized(got) = loaded.weight else { panic!("{name} is dense") };
        assert_eq!(got, *q, "{name}");
        weights.release(name);
    }
    let inspection = inspect(&weights).unwrap();
    assert_eq!(inspection.findings, []);
    let summaries: Vec<_> = inspection.modules.iter().filter(|m| m.scheme == "compressed-tensors").collect();
    assert_eq!(summaries.len(), expected.len());
    assert!(summaries.iter().all(|m| m.format == "w4a16-g128-asym" && m.shape.is_some()));
    assert_eq!(inspection.parameters, inspect(&source).unwrap().parameters);

    let dense = dir.path().join("dense");
    write_dense(Job::new(&weights, &dense), Float::F32).unwrap();
    let dense = Weights::open(&dense).unwrap();
    assert_eq!(dense.checkpoint().tensors().count(), source.checkpoint().tensors().count());
    for (name, q) in &expected {
        let got = dense.checkpoint().floats(&format!("{name}.weight")).unwrap().to_f32();
        assert!(got.iter().zip(dequantize(q)).all(|(&got, value)| f64::from(got) == value), "{name}");
    }
}

#[test]
fn a_folder_of_signed_bytes_is_listed_and_made_dense() {
    let format =
        WeightFormat { bits: 8, group: Group::Channel, zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
    let q = quantized(format, [4, 24]);
    let codes: Vec<i8> = q.codes().iter().map(|&c| (c ^ 0x80) as i8).collect();
    let tensors = [
        tensor("norm.weight", DType::F32, &[24], &[1f32; 24]),
        tensor("a.0.m.weight", DType::I8, &[4, 24], &codes),
        tensor("a.0.m.weight_scale", DType::F32, &[4, 1], q.scales()),
        tensor("a.0.m.input_scale", DType::F32, &[1], &[0.5f32]),
        tensor("a.0.m.bias", DType::F32, &[4], &[1f32; 4]),
    ];
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("int8"), dir.path().join("dense"));
    std::fs::create_dir(&source).unwrap();
    let config = config(r#"{"strategy": "channel"}"#).replace("pack-quantized", "int-quantized");
    write_folder(&source, &tensors, &config);
    let weights = Weights::open(&source).unwrap();
    assert_eq!(weights.modules(), ["a.0.m"]);
    assert!(matches!(weights.kind("a.0.m").unwrap(), ModuleKind::Quantized(_)));
    assert_eq!(weights.load_linear("a.0.m").unwrap().bias, Some(vec![1.0; 4]));
    assert_eq!(inspect(&weights).unwrap().modules[0].format, "w8a16-sf32");
    write_dense(Job::new(&weights, &target), Float::F32).unwrap();
    let dense = Weights::open(&target).unwrap();
    let names: Vec<&str> = dense.checkpoint().tensor_names().collect();
    assert_eq!(names, ["norm.weight", "a.0.m.weight", "a.0.m.bias"]);
    let got = dense.checkpoint().floats("a.0.m.weight").unwrap().to_f32();
    assert!(got.iter().zip(dequantize(&q)).all(|(&got, value)| got == value as f32));
}
