//! What several tests need: a tiny model with text, and methods that look at what they are given.

use halfbyte::cpu::Cpu;
use halfbyte::quantize::{Drift, Gptq, Hessian, Refine, Rtn};
use halfbyte::{Act, Float, Group, QTensor, WeightFormat, Zero};
use halfbyte_checkpoint::Weights;
use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_llm::arch::spec::LinearGroup;
use halfbyte_llm::calibrate::{
    self, ByGptq, Finished, Job, Layers, Method, Needs, Outcome, RoundToNearest, work_folder,
};
use halfbyte_llm::{Config, Error};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Mutex;
use tempfile::TempDir;

pub const WINDOW: usize = 24;
pub const FORMAT: WeightFormat =
    WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Integer, scale: Float::F16, channel_scale: None };

pub fn tokens(windows: usize) -> Vec<u32> {
    (0..windows * WINDOW).map(|i| (i as u32 * 7919 + 13) % 1009 % 320).collect()
}

/// A model, text, and a place to write to.
pub struct Case {
    pub source: Weights,
    pub config: Config,
    pub cpu: Cpu,
    pub tokens: Vec<u32>,
    pub here: TempDir,
    pub target: PathBuf,
}

impl Case {
    pub fn new(model: &str) -> Self {
        let here = TempDir::new().unwrap();
        Self {
            source: Weights::open(crate::architecture(model)).unwrap(),
            config: Config::from_folder(&crate::architecture(model)).unwrap(),
            cpu: Cpu::new(2).unwrap(),
            tokens: tokens(6),
            target: here.path().join("out"),
            here,
        }
    }

    pub fn run<'a>(&'a self, method: &'a dyn Method, change: impl FnOnce(&mut Job<'a>)) -> Result<Finished, Error> {
        self.run_until(method, usize::MAX, change)
    }

    /// The same model with biases everywhere.
    pub fn with_biases(model: &str) -> Self {
        let mut case = Self::new(model);
        let copy = case.here.path().join("biased");
        std::fs::create_dir(&copy).unwrap();
        let (config, path) = (
            std::fs::read_to_string(crate::architecture(model).join("config.json")).unwrap(),
            copy.join("config.json"),
        );
        std::fs::write(path, config.replace("_bias\": false", "_bias\": true")).unwrap();
        case.config = Config::from_folder(&copy).unwrap();
        assert!(case.config.spec.linears().all(|layer| layer.shape.bias));
        let mut tensors: Vec<(TensorSpec, Vec<u8>)> = Vec::new();
        for info in case.source.checkpoint().tensors() {
            let spec = |name: String, shape: &[usize]| TensorSpec { name, dtype: info.dtype, shape: shape.to_vec() };
            let bytes = case.source.checkpoint().bytes(info.name).unwrap();
            tensors.push((spec(info.name.to_owned(), info.shape), bytes.to_vec()));
            if let Some(layer) = info.name.strip_suffix("_proj.weight") {
                // A column of weights, which are as large as a bias may be.
                let [n, k] = [info.shape[0], info.shape[1]];
                let column = (0..n).flat_map(|i| bytes[i * k * 2..i * k * 2 + 2].to_vec()).collect();
                tensors.push((spec(format!("{layer}_proj.bias"), &[n]), column));
            }
        }
        let specs: Vec<TensorSpec> = tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let mut writer = create(&copy, &specs, u64::MAX).unwrap();
        tensors.iter().for_each(|(spec, bytes)| writer.write(&spec.name, bytes).unwrap());
        writer.finish().unwrap();
        case.source = Weights::open(&copy).unwrap();
        case
    }

    /// The same model with other bytes in one tensor.
    pub fn with_tensor(model: &str, name: &str, change: impl Fn(&mut [u8])) -> Self {
        let mut case = Self::new(model);
        let copy = case.here.path().join("changed");
        std::fs::create_dir(&copy).unwrap();
        std::fs::copy(crate::architecture(model).join("config.json"), copy.join("config.json")).unwrap();
        let whole = case.source.checkpoint();
        let spec = |info: halfbyte_checkpoint::TensorInfo<'_>| TensorSpec {
            name: info.name.to_owned(),
            dtype: info.dtype,
            shape: info.shape.to_vec(),
        };
        let specs: Vec<TensorSpec> = whole.tensors().map(spec).collect();
        let mut writer = create(&copy, &specs, u64::MAX).unwrap();
        for spec in &specs {
            let mut bytes = whole.bytes(&spec.name).unwrap().to_vec();
            if spec.name == name {
                change(&mut bytes);
            }
            writer.write(&spec.name, &bytes).unwrap();
        }
        writer.finish().unwrap();
        case.source = Weights::open(&copy).unwrap();
        case
    }

    /// Stops at the given call of the progress function.
    pub fn run_until<'a>(
        &'a self,
        method: &'a dyn Method,
        mut calls: usize,
        change: impl FnOnce(&mut Job<'a>),
    ) -> Result<Finished, Error> {
        let mut job = self.job(method);
        change(&mut job);
        calibrate::quantize(&job, &mut |_| {
            if calls == 0 {
                return ControlFlow::Break(());
            }
            calls -= 1;
            ControlFlow::Continue(())
        })
    }

    pub fn job<'a>(&'a self, method: &'a dyn Method) -> Job<'a> {
        Job {
            source: &self.source,
            config: &self.config,
            cpu: &self.cpu,
            tokens: &self.tokens,
            window: WINDOW,
            format: FORMAT,
            head: None,
            act: Act::A8,
            method,
            true_sequential: true,
            target: &self.target,
            restart: false,
        }
    }
}

/// Everything that a run leaves: layers, other tensors, report. Removes the work.
pub fn content(case: &Case, finished: Finished) -> (BTreeMap<String, QTensor>, BTreeMap<String, Vec<f32>>, String) {
    let names = case.source.checkpoint().tensor_names().map(str::to_owned);
    let (mut layers, mut changed) = (BTreeMap::new(), BTreeMap::new());
    for name in names {
        if let Some(values) = finished.changed(&name) {
            changed.insert(name.clone(), values.to_vec());
        }
        if let Some(module) = name.strip_suffix(".weight")
            && let Some(q) = finished.tensor(module).unwrap()
        {
            assert_eq!(finished.format(module), Some(q.format()));
            layers.insert(module.to_owned(), q);
        }
    }
    let report = format!("{:?}", finished.report());
    assert_eq!(finished.report().len(), layers.len());
    finished.remove().unwrap();
    assert!(!work_folder(&case.target).unwrap().exists());
    (layers, changed, report)
}

pub fn by_gptq() -> ByGptq {
    ByGptq { gptq: Gptq { act_order: true, ..Gptq::default() }, correct: None, refine: None }
}

/// All that there is to make it better.
pub fn refined() -> ByGptq {
    let gptq = Gptq { search: true, ..Gptq::default() };
    ByGptq { gptq, correct: Some(0.1), refine: Some(Refine::default()) }
}

/// Looks at everything, chooses factors, and rounds.
pub struct Scaling {
    pub factors: Vec<f32>,
    pub seen: Mutex<Vec<Seen>>,
}

pub struct Seen {
    pub group: LinearGroup,
    /// `tr(W · H · Wᵀ)` of the first layer, whose outputs nothing is folded into.
    pub outputs: f64,
    /// `Σ x²`.
    pub squares: f64,
    pub sample: usize,
}

impl Scaling {
    pub fn new(factors: &[f32]) -> Self {
        Self { factors: factors.to_vec(), seen: Mutex::new(Vec::new()) }
    }

    pub fn see(&self, layers: &Layers<'_>) {
        let k = layers.k();
        let last = layers.group.layers.len() == 1;
        match layers.inputs.drift().unwrap() {
            Drift::Outputs(moment) => assert_eq!((last, [moment.m(), moment.k()]), (true, [layers.group.n(), k])),
            Drift::Inputs(moment) => assert_eq!((last, [moment.m(), moment.k()]), (false, [k, k])),
        }
        self.seen.lock().unwrap().push(Seen {
            group: layers.group.clone(),
            outputs: layers.each().next().unwrap().0.chunks(k).map(|w| quadratic(w, &layers.inputs.hessian)).sum(),
            squares: (0..k).map(|j| layers.inputs.hessian.get(j, j)).sum(),
            sample: layers.inputs.sample().len() / k,
        });
    }
}

impl Method for Scaling {
    fn settings(&self) -> String {
        format!("scaling {:?}", self.factors)
    }

    fn needs(&self) -> Needs {
        Needs { scales: !self.factors.is_empty(), drift: true, rows: 10 }
    }

    fn scales(&self, block: &[Layers<'_>], _: WeightFormat) -> halfbyte::Result<Vec<Option<Vec<f32>>>> {
        block.iter().for_each(|layers| self.see(layers));
        let of_group = |layers: &Layers<'_>| {
            let factors = self.factors.iter().copied().cycle().take(layers.k()).collect();
            layers.group.fold.as_ref().map(|_| factors)
        };
        Ok(block.iter().map(of_group).collect())
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> halfbyte::Result<Vec<Outcome>> {
        self.see(layers);
        RoundToNearest(Rtn::default()).quantize(layers, format)
    }
}

pub fn quadratic(row: &[f32], hessian: &Hessian) -> f64 {
    let value = |i: usize| f64::from(row[i]);
    (0..row.len()).map(|i| (0..row.len()).map(|j| value(i) * hessian.get(i, j) * value(j)).sum::<f64>()).sum()
}

/// Makes every weight zero.
pub struct Nothing;

impl Method for Nothing {
    fn settings(&self) -> String {
        "nothing".to_owned()
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> halfbyte::Result<Vec<Outcome>> {
        let zeros = vec![0.0; layers.weights.len()];
        RoundToNearest(Rtn::default()).quantize(&Layers { weights: &zeros, ..*layers }, format)
    }
}
