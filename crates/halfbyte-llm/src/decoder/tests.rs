//! Random specs, cut for one to four ranks, with experts, several texts together and their keys and values in shared pages,
//! give the numbers of one rank with one text at a time.

use super::{Attention, Behind, Decoder, Experts, InPlace, ModelDevice, Norm, Slot, Steps};
use crate::arch::spec::{
    AttentionSpec, ExpertsSpec, FeedForward, GateClamp, LayerSpec, LinearSpec, MlpKind, MlpSpec, NormKind, NormSpec,
    Positions, Qkv, QkvOrder, Residual, RopeSpec, Routing, Shape, Spec,
};
use crate::comm::{Alone, Comm, Thread};
use crate::device::cpu::{OnCpu, Run, State};
use crate::load::{LoadOptions, Loader};
use crate::shard::Shard;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::{KvCache, KvType, Sequence};
use halfbyte::kernel::{Activation, Heads};
use halfbyte::quantize::Rtn;
use halfbyte::random::splitmix64;
use halfbyte::{Format, WeightFormat};
use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_checkpoint::{DType, Weights};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// From a seed.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        splitmix64(&mut self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn flag(&mut self) -> bool {
        self.below(2) == 0
    }

    /// From −1 to 1.
    fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

fn spec(random: &mut Random) -> Spec {
    let heads = Heads { heads: 0, kv_heads: random.of(&[1, 2, 3, 4, 5]), head_size: random.of(&[8, 16]) };
    let heads = Heads { heads: heads.kv_heads * random.of(&[1, 2, 4]), ..heads };
    let (hidden, inner) = (random.of(&[24, 32, 40]), 8 * random.of(&[4, 5, 7, 12]));
    let (q, kv) = (heads.heads * heads.head_size, heads.kv_heads * heads.head_size);
    let (kind, eps) = (random.of(&[NormKind::Rms, NormKind::Layer]), 1e-5);
    let offset = random.of(&[0.0, 0.5]);
    let norm = |name: String| NormSpec { name, kind, eps, offset };
    let frequencies = (0..heads.head_size / 2).map(|i| 0.5f64.powi(i as i32)).collect();
    let rope = Arc::new(RopeSpec { frequencies, long: None, factor: 1.0 });
    let bias = random.flag();
    let linear = |name: String, n, k| LinearSpec { name, shape: Shape { n, k, bias } };
    let residual = random.of(&[Residual::Sequential, Residual::Parallel]);
    let post_norm =
        |random: &mut Random, name: String| (residual == Residual::Sequential && random.flag()).then(|| norm(name));
    let layer = |random: &mut Random, i: usize| {
        let at = |module: &str| format!("layers.{i}.{module}");
        let fused = |order| Qkv::Fused(linear(at("qkv"), q + 2 * kv, hidden), order);
        let split = [("q", q), ("k", kv), ("v", kv)].map(|(name, n)| linear(at(name), n, hidden));
        let qkv = match random.below(3) {
            0 => Qkv::Split(Box::new(split)),
            1 => fused(QkvOrder::Blocks),
            _ => fused(QkvOrder::Groups),
        };
        let over_heads = |name: &str| NormSpec { kind: NormKind::Rms, ..norm(at(name)) };
        let (gated, joined, activation) =
            (random.flag(), random.flag(), random.of(&[Activation::Silu, Activation::Gelu, Activation::GeluTanh]));
        let clamp = random.flag().then_some(GateClamp { alpha: 1.5, limit: 0.7 });
        let up_layers: &[(&str, usize)] = match (gated, joined) {
            (false, _) => &[("up", 1)],
            (true, false) => &[("gate", 1), ("up", 1)],
            (true, true) => &[("gate_up", 2)],
        };
        let mlp = |name: String| FeedForward {
            up: up_layers.iter().map(|(up, n)| linear(format!("{name}.{up}"), n * inner, hidden)).collect(),
            down: linear(format!("{name}.down"), hidden, inner),
            activation,
            clamp: clamp.filter(|_| gated),
        };
        let kind = match random.flag() {
            true => MlpKind::Dense(mlp(at("mlp"))),
            false => {
                let count = 2 + random.below(4);
                MlpKind::Experts(ExpertsSpec {
                    router: linear(at("router"), count, hidden),
                    top_k: 1 + random.below(count),
                    routing: random.of(&[Routing::Softmax, Routing::SoftmaxOfChosen]),
                    experts: (0..count).map(|expert| mlp(at(&format!("experts.{expert}")))).collect(),
                })
            }
        };
        let has_norm = residual == Residual::Sequential || random.flag();
        LayerSpec {
            attention: AttentionSpec {
                norm: norm(at("norm")),
                qkv,
                head_norms: random.flag().then(|| [over_heads("q_norm"), over_heads("k_norm")]),
                positions: match random.below(3) {
                    0 => Positions::Rope(rope.clone()),
                    1 => Positions::Alibi,
                    _ => Positions::None,
                },
                window: random.flag().then(|| 1 + random.below(9)),
                scale: (heads.head_size as f32).sqrt().recip(),
                cap: random.flag().then_some(0.8),
                sinks: random.flag().then(|| at("sinks")),
                output: linear(at("o"), hidden, q),
                post_norm: post_norm(random, at("post_norm")),
            },
            mlp: MlpSpec {
                norm: has_norm.then(|| norm(at("mlp_norm"))),
                kind,
                post_norm: post_norm(random, at("mlp_post_norm")),
            },
            residual,
        }
    };
    let layers = (0..2).map(|i| layer(random, i)).collect();
    let embedding_norm = random.flag().then(|| norm("embedding_norm".to_owned()));
    let head = random.flag().then(|| "head".to_owned());
    let vocab = 50 + random.below(40);
    Spec {
        vocab,
        hidden,
        heads,
        max_context: 64,
        embedding: "embedding".to_owned(),
        embedding_scale: random.flag().then_some(3.0),
        embedding_norm,
        layers,
        norm: norm("norm".to_owned()),
        head,
        logit_cap: random.flag().then_some(2.0),
    }
}

fn write(spec: &Spec, folder: &Path, random: &mut Random) {
    let tensors = spec.tensors();
    let specs =
        tensors.iter().map(|(name, shape)| TensorSpec { name: name.clone(), dtype: DType::F32, shape: shape.clone() });
    let mut writer = create(folder, &specs.collect::<Vec<_>>(), u64::MAX).unwrap();
    for (name, shape) in &tensors {
        let (least, range) = match shape.as_slice() {
            [_, k] => (0.0, 2.0 * (*k as f32).powf(-0.5)),
            _ if name.ends_with("weight") => (1.0, 0.3),
            _ => (0.0, 0.2),
        };
        let bytes: Vec<u8> =
            (0..shape.iter().product()).flat_map(|_| (least + range * random.value()).to_le_bytes()).collect();
        writer.write(name, &bytes).unwrap();
    }
    writer.finish().unwrap();
}

/// Logits of the last token of each text after each batch: of all texts together, and then of one token each.
fn logits(
    spec: &Spec,
    weights: &Weights,
    options: &LoadOptions,
    batches: &[Vec<(usize, Vec<u32>)>],
    comm: &dyn Comm,
) -> crate::Result<Vec<Vec<f32>>> {
    let cpu = Cpu::new(1)?;
    let mut loader = Loader::new(weights, options.clone())?;
    let decoder = Decoder::load(spec, &mut loader, &mut OnCpu, Shard::of(comm))?;
    let mut cache = KvCache::new(spec.layers.len(), decoder.heads, 4096, KvType::F32)?;
    let sequences: Vec<Sequence> = (0..4).map(|_| cache.begin()).collect();
    let mut state = State::new(spec.hidden, decoder.heads, cache);
    let mut out = Vec::new();
    for batch in batches {
        let texts: Vec<(Sequence, &[u32])> =
            batch.iter().map(|(text, ids)| (sequences[*text], ids.as_slice())).collect();
        state.begin(&texts);
        decoder.forward(&mut Run { cpu: &cpu, comm, state: &mut state, tap: None }, false)?;
        let mut logits = vec![0.0; batch.len() * spec.vocab];
        decoder.vocabulary.logits(&cpu, comm, state.normed(&(0..batch.len())), batch.len(), &mut logits)?;
        out.extend(logits.chunks_exact(spec.vocab).map(<[f32]>::to_vec));
    }
    Ok(out)
}

#[test]
fn a_model_cut_for_ranks_joins_to_the_same_numbers() {
    let mut random = Random(17);
    let (mut compared, mut refused) = ([0; 5], 0);
    for case in 0..30 {
        let spec = spec(&mut random);
        let folder = tempfile::tempdir().unwrap();
        write(&spec, folder.path(), &mut random);
        let weights = Weights::open(folder.path()).unwrap();
        let quantize = random.flag().then(|| {
            let format: Format = random.of(&["w8a16-g8-sf32", "w4a16-g8-asym", "w8a16"]).parse().unwrap();
            let weight: WeightFormat = format.weight;
            (weight, Rtn::default())
        });
        let options = LoadOptions { quantize, ..LoadOptions::default() };
        let mut ids = |n: usize| (0..n).map(|_| random.below(spec.vocab) as u32).collect::<Vec<_>>();
        let [a, b, c] = [7, 3, 12].map(&mut ids);
        let [more_a, more_b, more_c] = [1, 1, 4].map(&mut ids);
        let alone: Vec<Vec<f32>> = [(&a, &more_a), (&b, &more_b), (&c, &more_c)]
            .into_iter()
            .flat_map(|(first, more)| {
                let batches = [vec![(0, first.clone())], vec![(0, more.clone())]];
                logits(&spec, &weights, &options, &batches, &Alone).unwrap()
            })
            .collect();
        // Texts in turn within a batch, and not in the order in which they began.
        let together = [vec![(2, c), (0, a), (1, b)], vec![(1, more_b), (2, more_c), (0, more_a)]];
        let want = [4, 0, 2, 3, 5, 1].map(|i| &alone[i]);
        for size in 1..=4 {
            let run = |comm: Thread| logits(&spec, &weights, &options, &together, &comm);
            let ranks: Vec<_> = (0..size).map(|rank| Shard::of(&Rank { rank, size }).heads(spec.heads)).collect();
            if ranks.iter().any(Result::is_err) {
                refused += 1;
                continue;
            }
            let got: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    Thread::group(size).into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for got in &got {
                for (got, want) in got.as_ref().unwrap().iter().zip(&want) {
                    let size_of = (want.iter().map(|v| v * v).sum::<f32>() / want.len() as f32).sqrt();
                    let worst = got.iter().zip(*want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(worst <= 2e-4 * size_of, "case {case}, {size} ranks: {worst} of {size_of}: {spec:#?}");
                    assert!(size_of > 1e-3 && got.len() == spec.vocab);
                }
            }
            compared[size] += 1;
        }
    }
    assert!(compared[1] == 30 && compared[2..].iter().all(|&n| n > 10), "{compared:?}, {refused} refused");
}

/// A run that checks what is said to be behind updates: the norm that comes next, and the one product that reads it.
struct Checked<'m> {
    run: Run<'m>,
    /// A norm and its reader that were announced.
    behind: Option<[*const (); 2]>,
    /// The reader of the last norm, if that was announced, and whether it has read.
    reader: Option<(*const (), bool)>,
    announced: usize,
}

type Projection = <OnCpu as ModelDevice>::Projection;

fn address<T>(of: &T) -> *const () {
    std::ptr::from_ref(of).cast()
}

impl Steps<OnCpu> for Checked<'_> {
    fn embed(&mut self, vocabulary: &<OnCpu as ModelDevice>::Vocabulary) -> crate::Result<()> {
        self.run.embed(vocabulary)
    }

    fn norm(&mut self, add: bool, norm: &Norm<OnCpu>, reader: Option<&Projection>) -> crate::Result<()> {
        assert!(self.reader.is_none_or(|(_, has_read)| has_read), "nobody read a norm that had a reader");
        self.reader = self.behind.take().map(|[of_norm, of_reader]| {
            assert!(add && of_norm == address(norm) && reader.is_some_and(|reader| of_reader == address(reader)));
            (of_reader, false)
        });
        self.run.norm(add, norm, reader)
    }

    fn norm_in_place(&mut self, what: InPlace, norm: &Norm<OnCpu>) -> crate::Result<()> {
        assert!(self.behind.is_none(), "another norm than the one that was announced");
        self.run.norm_in_place(what, norm)
    }

    fn add(&mut self) -> crate::Result<()> {
        assert!(self.behind.is_none(), "an update is added although a norm was announced");
        self.run.add()
    }

    fn project(&mut self, by: &Projection, from: Slot, to: Slot) -> crate::Result<()> {
        assert!(self.behind.is_none(), "a product although a norm was announced");
        if let Some((reader, has_read)) = self.reader.as_mut().filter(|_| from == Slot::Normed) {
            assert!(*reader == address(by) && !*has_read, "another reader than the one that was announced");
            *has_read = true;
        }
        self.run.project(by, from, to)
    }

    fn update(&mut self, by: &Projection, from: Slot, behind: Option<Behind<'_, OnCpu>>) -> crate::Result<()> {
        self.announced += usize::from(behind.is_some());
        let of = |Behind { norm, reader }: &Behind<'_, OnCpu>| [address::<Norm<OnCpu>>(norm), address(*reader)];
        self.behind = behind.as_ref().map(of);
        self.run.update(by, from, behind)
    }

    fn append(&mut self, layer: usize, attention: &Attention<OnCpu>) -> crate::Result<()> {
        self.run.append(layer, attention)
    }

    fn last_rows(&mut self) -> crate::Result<()> {
        self.run.last_rows()
    }

    fn attend(&mut self, layer: usize, attention: &Attention<OnCpu>) -> crate::Result<()> {
        self.run.attend(layer, attention)
    }

    fn activate(&mut self, mlp: &super::FeedForward<OnCpu>) -> crate::Result<()> {
        self.run.activate(mlp)
    }

    fn experts(&mut self, experts: &Experts<OnCpu>) -> crate::Result<ControlFlow<()>> {
        assert!(self.behind.is_none() && self.reader.is_none_or(|(_, has_read)| has_read), "experts read a norm");
        self.run.experts(experts)
    }
}

#[test]
fn what_is_behind_an_update_is_what_reads_the_stream_next() {
    let mut random = Random(18);
    let (mut all, mut with_none) = (0, 0);
    for _ in 0..80 {
        let spec = spec(&mut random);
        let folder = tempfile::tempdir().unwrap();
        write(&spec, folder.path(), &mut random);
        let weights = Weights::open(folder.path()).unwrap();
        let cpu = Cpu::new(1).unwrap();
        let mut loader = Loader::new(&weights, LoadOptions::default()).unwrap();
        let decoder = Decoder::load(&spec, &mut loader, &mut OnCpu, Shard::of(&Alone)).unwrap();
        let mut cache = KvCache::new(spec.layers.len(), decoder.heads, 64, KvType::F32).unwrap();
        let text = cache.begin();
        let mut state = State::new(spec.hidden, decoder.heads, cache);
        state.begin(&[(text, &[1, 2, 3])]);
        let run = Run { cpu: &cpu, comm: &Alone, state: &mut state, tap: None };
        let mut checked = Checked { run, behind: None, reader: None, announced: 0 };
        decoder.forward(&mut checked, false).unwrap();
        assert!(checked.behind.is_none(), "a norm was announced that did not come");
        assert_eq!(checked.announced, decoder.updates().count());
        all += checked.announced;
        with_none += usize::from(checked.announced == 0);
    }
    assert!(all > 30 && (10..70).contains(&with_none), "{all} announced, {with_none} without any");
}

/// A rank that only says which it is.
#[derive(Debug)]
struct Rank {
    rank: usize,
    size: usize,
}

impl Comm for Rank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&self, values: &[f32]) -> crate::Result<Vec<Arc<[f32]>>> {
        Ok(vec![values.into()])
    }

    fn leave(&self, _: &str) {}

    fn look(&self) -> crate::Result<()> {
        Ok(())
    }
}
