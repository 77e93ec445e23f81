//! What configs say of single modules, held against their tensors.

use crate::compressed_tensors::{FOUR_BITS, four_bits, pack, with_groups};
use crate::gptq::{random, tensors_of};
use crate::support::{Tensor, assert_names, goldens, taken, tensor, testdata, write_folder};
use crate::{awq, bitsandbytes};
use half::f16;
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero};
use halfbyte_checkpoint::Checkpoint;
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{GptqVersion, LinearWeight, ModuleKind, Weights, inspect};

#[test]
fn the_output_head_may_be_quantised_or_not_in_every_scheme() {
    let named = |tensors: Vec<Tensor>, module: &str| -> Vec<Tensor> {
        tensors.into_iter().map(|t| (format!("{module}{}", &t.0[1..]), t.1, t.2, t.3)).collect()
    };
    let (_, gptq) = goldens().into_iter().find(|(name, _)| name == "gptq_w4_g32_sym").unwrap();
    let gptq = [("qweight", "m.qweight"), ("v1.qzeros", "m.qzeros"), ("scales", "m.scales"), ("g_idx", "m.g_idx")]
        .map(|(from, to)| taken(&gptq, from, to))
        .to_vec();
    let (awq, awq_group) = awq::goldens().into_iter().next().unwrap();
    let marlin = Checkpoint::open(testdata("marlin/marlin_pc.safetensors")).unwrap();
    let marlin = vec![taken(&marlin, "B", "m.B"), taken(&marlin, "s", "m.s")];
    let of = |fields: &str| format!(r#"{{"quantization_config": {{{fields}}}}}"#);
    let four_bits_of_bnb = bitsandbytes::tensors(&bitsandbytes::golden("nf4_b64_f16"), "m");
    let bytes_of_bnb = bitsandbytes::tensors(&bitsandbytes::golden("int8"), "m");
    // Scheme, a module `m`, the config of a model whose head is quantised, and of one whose head is not.
    let gptq_fields = r#""quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true"#;
    let marlin_fields = r#""quant_method": "marlin", "group_size": -1"#;
    let groups =
        |target: &str| with_groups(&format!(r#"{{"a": {{"targets": ["{target}"], "weights": {FOUR_BITS}}}}}"#));
    let nf4 = r#""load_in_4bit": true, "bnb_4bit_quant_type": "nf4""#;
    let int8 = r#""load_in_8bit": true"#;
    let bnb = |how: &str, skipped: &str| {
        of(&format!(r#""quant_method": "bitsandbytes", {how}, "llm_int8_skip_modules": [{skipped}]"#))
    };
    let awq_config = awq::config_of("gemm", awq_group);
    let cases = [
        ("gptq", gptq, of(&format!(r#"{gptq_fields}, "lm_head": true"#)), of(gptq_fields)),
        ("marlin", marlin, of(&format!(r#"{marlin_fields}, "lm_head": true"#)), of(marlin_fields)),
        ("awq", awq::packed(&awq, "gemm"), awq_config.clone(), awq_config),
        (
            "compressed-tensors",
            pack("m", &four_bits(), false),
            groups("Linear").replace("\"lm_head\"", ""),
            groups("Linear"),
        ),
        ("bitsandbytes", four_bits_of_bnb, bnb(nf4, ""), bnb(nf4, r#""lm_head""#)),
        ("bitsandbytes", bytes_of_bnb, bnb(int8, ""), bnb(int8, r#""lm_head""#)),
    ];
    for (scheme, module, quantised_head, dense_head) in cases {
        for (config, quantised) in [(quantised_head, true), (dense_head, false)] {
            let mut tensors = named(module.clone(), "model.layers.0.mlp.down_proj");
            let dense = tensor("lm_head.weight", DType::F16, &[3, 2], &[f16::ONE; 6]);
            tensors.extend(if quantised { named(module.clone(), "lm_head") } else { vec![dense] });
            let dir = tempfile::tempdir().unwrap();
            write_folder(dir.path(), &tensors, &config);
            let weights = Weights::open(dir.path()).unwrap();
            let findings = inspect(&weights).unwrap().findings;
            // What holds of all int8 modules is said of them as a whole.
            let expected = weights.findings();
            assert_eq!(findings, expected, "{scheme}, {quantised}");
            match weights.kind("lm_head").unwrap() {
                ModuleKind::Quantized(found) => assert!(quantised && found.name == scheme, "{scheme}, {quantised}"),
                ModuleKind::Dense => assert!(!quantised, "{scheme}"),
                ModuleKind::Absent => panic!("{scheme}"),
            }
            let head = weights.load_linear("lm_head").unwrap();
            let other = weights.load_linear("model.layers.0.mlp.down_proj").unwrap();
            assert_eq!((head.findings, other.findings), (vec![], vec![]), "{scheme}, {quantised}");
            assert_eq!(head.weight.shape(), if quantised { other.weight.shape() } else { [3, 2] });
        }
    }
}

/// The findings of a module `m` that is stored as `q`, under a config with these fields.
fn findings_under(q: &QTensor, name: &str, fields: &str) -> Vec<String> {
    let tensors: Vec<Tensor> = tensors_of(q, GptqVersion::V1)
        .into_iter()
        .map(|(part, dtype, shape, data)| (format!("{name}{}", &part[1..]), dtype, shape, data))
        .collect();
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), &tensors, &format!(r#"{{"quantization_config": {{"quant_method": "gptq", {fields}}}}}"#));
    let weights = Weights::open(dir.path()).unwrap();
    let loaded = weights.load_linear(name).unwrap();
    let LinearWeight::Quantized(read) = loaded.weight else { panic!("expected a quantised weight") };
    assert_eq!(&read, q, "{fields}");
    let inspected = inspect(&weights).unwrap().findings;
    assert_eq!(inspected[inspected.len() - loaded.findings.len()..].len(), loaded.findings.len());
    assert!(loaded.findings.iter().all(|finding| inspected.contains(finding)), "{inspected:?}");
    inspected.iter().map(|f| f.to_string()).collect()
}

#[test]
fn settings_that_gptq_has_for_single_modules_are_held_against_the_tensors() {
    let eight =
        WeightFormat { bits: 8, group: Group::Size(16), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
    let q = random(21, eight, [32, 64], false);
    let under = |dynamic: &str| {
        let fields =
            format!(r#""bits": 4, "group_size": 32, "sym": true, "desc_act": false, "dynamic": {{{dynamic}}}"#);
        findings_under(&q, "h.0.m", &fields)
    };
    // The first rule that matches is the one.
    let own = r#"{"bits": 8, "group_size": 16}"#;
    for dynamic in [
        format!(r#""+:.*m": {own}"#),
        format!(r#"".*m": {own}"#),
        format!(r#""+:h\\.0": {own}"#),
        format!(r#""-:m": {{}}, "+:x": {{}}, "+:.*m$": {own}, "-:.*": {{}}"#),
    ] {
        assert_eq!(under(&dynamic), [""; 0], "{dynamic}");
    }
    let texts = under(r#""+:h.0.m": {"bits": 4}, "+:.*": {"bits": 8, "group_size": 16}"#);
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert_names(&texts[0], &["h.0.m: the config says 4 bits for it", "read as 8 bits"]);
    assert_names(&texts[1], &["h.0.m: the config says group_size 32 for it", "read as 16"]);
    // Without a rule of its own it has the settings of all, but not the strictness of a config that has no rules.
    assert_eq!(under(r#""+:x": {}"#).len(), 2);
    let texts = under(&format!(r#""-:h": {{}}, "+:.*m": {own}"#));
    assert_names(&texts.concat(), &["leaves it out (dynamic, `-:h`)", "read as quantised"]);
    // A rule that is not read may have been for it: the tensors tell then.
    let texts = under(r#""+:(?=h)h": {"bits": 8, "group_size": 16}"#);
    assert_eq!(texts.len(), 1, "{texts:?}");
    assert_names(&texts[0], &["quantization_config", "(?=h)h", "in dynamic", "look-around"]);
    assert_eq!(under(&format!(r#""+:h": {own}, "-:(?=h)h": {{}}"#)).len(), 1);

    // A rule's symmetry and order of columns count too.
    let asymmetric = random(22, WeightFormat { zero: Zero::Integer, ..eight }, [32, 64], true);
    let fields = |own: &str| {
        format!(r#""bits": 8, "group_size": 16, "sym": true, "desc_act": false, "dynamic": {{"+:m": {{{own}}}}}"#)
    };
    assert_eq!(findings_under(&asymmetric, "m", &fields(r#""sym": false, "desc_act": true"#)), [""; 0]);
    let texts = findings_under(&asymmetric, "m", &fields("")).concat();
    assert_names(&texts, &["desc_act false", "says sym, but zero points other than 128"]);
}

#[test]
fn modules_of_gptq_are_dense_or_not_by_their_tensors() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
    let q = random(23, format, [32, 64], false);
    let plain = r#""bits": 4, "group_size": 32, "sym": true"#;
    let under = |module: &str, more: &str| findings_under(&q, module, &format!("{plain}{more}"));
    let listed = r#", "modules_in_block_to_quantize": [["attn.q", "attn.k"], ["mlp.up"]]"#;
    for (module, more) in [
        ("h.0.attn.q", listed),
        ("h.0.mlp.up", listed),
        ("head", listed),
        ("lm_head", r#", "lm_head": true"#),
        ("lm_head", r#", "dynamic": {"+:lm_head": {}}"#),
    ] {
        assert_eq!(under(module, more), [""; 0], "{module} {more}");
    }
    for (module, more, part) in [
        ("h.0.attn.v", listed, "modules_in_block_to_quantize does not have it"),
        ("h.0.xattn.q", listed, "modules_in_block_to_quantize does not have it"),
        ("lm_head", "", "does not say that lm_head is quantised"),
        ("model.lm_head", r#", "lm_head": false"#, "does not say that lm_head is quantised"),
    ] {
        let texts = under(module, more);
        assert_eq!(texts.len(), 1, "{module} {more}: {texts:?}");
        assert_names(&texts[0], &[module, part, "read as quantised"]);
    }
    // The other way round.
    let dense = ["h.0.attn.q", "h.0.attn.v", "lm_head", "embed"];
    let mut tensors: Vec<Tensor> =
        dense.iter().map(|m| tensor(&format!("{m}.weight"), DType::F16, &[1, 2], &[f16::ONE; 2])).collect();
    tensors.extend(tensors_of(&q, GptqVersion::V1));
    let findings = |more: &str| {
        let dir = tempfile::tempdir().unwrap();
        write_folder(
            dir.path(),
            &tensors,
            &format!(r#"{{"quantization_config": {{"quant_method": "gptq", {plain}{more}}}}}"#),
        );
        let weights = Weights::open(dir.path()).unwrap();
        let texts: Vec<String> = inspect(&weights).unwrap().findings.iter().map(|f| f.to_string()).collect();
        (texts, weights.load_linear("h.0.attn.q").unwrap().findings.len())
    };
    assert_eq!(findings(""), (vec![], 0));
    let (texts, of_q) = findings(&format!(r#"{listed}, "lm_head": true"#));
    assert_eq!((texts.len(), of_q), (2, 1), "{texts:?}");
    assert_names(&texts.concat(), &["h.0.attn.q: the config's modules_in_block_to_quantize has `attn.q`"]);
    assert_names(&texts.concat(), &["lm_head: the config says lm_head true, but its weight is stored as floats"]);
    let (texts, of_q) = findings(r#", "dynamic": {"+:.*[qd]$": {"bits": 8}, "-:.*v": {}}"#);
    assert_eq!((texts.len(), of_q), (2, 1), "{texts:?}");
    assert_names(&texts.concat(), &["h.0.attn.q: the config has settings for it", "lm_head: the config has settings"]);
}

#[test]
fn modules_of_awq_are_dense_or_not_by_their_tensors() {
    let (golden, group) = awq::goldens().into_iter().next().unwrap();
    let config = awq::config_of("gemm", group);
    let tensors = awq::packed(&golden, "gemm");
    // A layer of a block that is dense without being listed; one that is listed; one outside of the blocks.
    let mut model: Vec<Tensor> =
        tensors.iter().map(|t| (format!("h.0.{}", t.0), t.1, t.2.clone(), t.3.clone())).collect();
    for name in ["h.0.a.gate.weight", "h.0.b.weight", "lm_head.weight"] {
        model.push(tensor(name, DType::F16, &[1, 2], &[f16::ONE; 2]));
    }
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), &model, &config.replace("\"bits\"", r#""modules_to_not_convert": ["gate"], "bits""#));
    let weights = Weights::open(dir.path()).unwrap();
    let findings = inspect(&weights).unwrap().findings;
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].subject, "h.0.b");
    assert_names(&findings[0].text, &["says awq", "modules_to_not_convert", "read as dense"]);
    assert_eq!(weights.load_linear("h.0.b").unwrap().findings, findings);
}

#[test]
fn layers_that_the_config_names_joined_are_found() {
    let q = four_bits();
    let group = |target: &str| with_groups(&format!(r#"{{"a": {{"targets": ["{target}"], "weights": {FOUR_BITS}}}}}"#));
    let findings_of = |module: &str, config: &str| {
        let dir = tempfile::tempdir().unwrap();
        write_folder(dir.path(), &pack(module, &q, false), config);
        let weights = Weights::open(dir.path()).unwrap();
        let loaded = weights.load_linear(module).unwrap();
        let LinearWeight::Quantized(read) = loaded.weight else { panic!("expected a quantised weight") };
        assert_eq!(read, q);
        assert_eq!(inspect(&weights).unwrap().findings, loaded.findings);
        loaded.findings.iter().map(|f| f.text.clone()).collect::<Vec<_>>()
    };
    for (target, module, joined) in [
        ("h.0.attn.qkv_proj", "h.0.attn.k_proj", "`h.0.attn.qkv_proj`"),
        ("re:.*gate_up_proj$", "h.1.mlp.up_proj", "`h.1.mlp.gate_up_proj`"),
        ("re:.*q_proj", "h.0.attn.qkv_proj", "`h.0.attn.q_proj`"),
    ] {
        let texts = findings_of(module, &group(target));
        assert_eq!(texts.len(), 1, "{texts:?}");
        assert_names(&texts[0], &["targets", joined, "taken for it too"]);
        // Named itself, nothing is odd.
        assert_eq!(findings_of(module, &group(&format!("re:.*{}", &module[4..]))), [""; 0]);
    }
    let ignored = group("Linear").replace("\"lm_head\"", r#""re:.*qkv_proj""#);
    let texts = findings_of("h.0.attn.v_proj", &ignored);
    assert_eq!(texts.len(), 1, "{texts:?}");
    assert_names(&texts[0], &["ignore `h.0.attn.qkv_proj`", "read as quantised"]);
}

#[test]
fn modules_of_compressed_tensors_are_dense_or_not_by_their_tensors() {
    let q = four_bits();
    let mut tensors: Vec<Tensor> =
        ["h.0.a", "h.0.b", "lm_head"].iter().flat_map(|module| pack(module, &q, false)).collect();
    for name in ["embed_tokens", "h.0.c", "h.0.d"] {
        tensors.push(tensor(&format!("{name}.weight"), DType::F16, &[1, 2], &[f16::ONE; 2]));
    }
    let findings_of = |ignore: &str, targets: &str| {
        let groups = format!(r#"{{"g": {{"targets": [{targets}], "weights": {FOUR_BITS}}}}}"#);
        let dir = tempfile::tempdir().unwrap();
        write_folder(dir.path(), &tensors, &with_groups(&groups).replace("\"lm_head\"", ignore));
        let mut texts: Vec<String> =
            inspect(&Weights::open(dir.path()).unwrap()).unwrap().findings.iter().map(|f| f.to_string()).collect();
        texts.sort();
        texts
    };
    assert_eq!(findings_of(r#""h.0.c", "re:.*\\.d$""#, r#""Linear""#), [""; 0]);
    let texts = findings_of(r#""lm_head", "re:h.0.[bd]""#, r#""Linear""#);
    assert_eq!(texts.len(), 3, "{texts:?}");
    assert_names(&texts[0], &["h.0.b: the config says to ignore it (`re:h.0.[bd]`)", "read as quantised"]);
    assert_names(&texts[1], &["h.0.c: the config's g targets `Linear`", "read as dense"]);
    assert_names(&texts[2], &["lm_head: the config says to ignore it", "read as quantised"]);
    let texts = findings_of("", r#""re:.*[abc]$""#);
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert_names(&texts[0], &["h.0.c: the config's g targets it (`re:.*[abc]$`)", "read as dense"]);
    assert_names(&texts[1], &["lm_head: no group of the config targets it", "read as quantised"]);
    // Expressions that are not read match nothing, and that is said.
    let texts = findings_of(r#""re:(?!x)h.0.[cd]""#, r#""Linear""#);
    assert_eq!(texts.len(), 3, "{texts:?}");
    assert_names(&texts[2], &["quantization_config: `re:(?!x)h.0.[cd]` in ignore", "look-around", "match nothing"]);
}

#[test]
fn shapes_tell_awq_from_gptq_whatever_the_config_says() {
    let load = |tensors: &[Tensor], config: &str| {
        let dir = tempfile::tempdir().unwrap();
        write_folder(dir.path(), tensors, config);
        let weights = Weights::open(dir.path()).unwrap();
        let loaded = weights.load_linear("m").unwrap();
        let LinearWeight::Quantized(q) = loaded.weight else { panic!("expected a quantised weight") };
        (q, loaded.findings.iter().map(|f| f.text.clone()).collect::<Vec<_>>())
    };
    let gptq_config = r#"{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true}}"#;
    for (golden, group) in awq::goldens() {
        for layout in ["gemm", "gemv_fast"] {
            let tensors = awq::packed(&golden, layout);
            let (expected, _) = load(&tensors, &awq::config_of(layout, group));
            let (q, texts) = load(&tensors, gptq_config);
            assert_eq!(q, expected, "{layout} {group}");
            assert_eq!(texts.len(), 1, "{layout} {group}: {texts:?}");
            assert_names(&texts[0], &["says gptq", "those of awq", "read as awq"]);
        }
    }
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
    let q = random(31, format, [32, 64], false);
    let (read, texts) = load(&tensors_of(&q, GptqVersion::V1), &awq::config_of("gemm", 32));
    assert_eq!(read, q);
    assert_eq!(texts.len(), 1, "{texts:?}");
    assert_names(&texts[0], &["says awq", "those of gptq", "read as gptq"]);
}
