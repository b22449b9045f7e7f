"""Small networks for sequences of tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import require_positive
from polymode.models.initialisation import initialise, truncated_normal_


class MeanEmbedding(nn.Module):
    """The mean of the tokens' embeddings, one hidden layer, one linear layer; token 0 is padding.

    A bag of words: fast, and hard to beat on long reviews by networks of its size.
    """

    def __init__(
        self, num_outputs: int = 2, vocabulary: int = 20_000, width: int = 32, hidden: int = 32
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, hidden)
        self.classifier = nn.Linear(hidden, num_outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        present = (tokens != 0).unsqueeze(-1)
        embedded = self.embedding(tokens) * present
        mean = embedded.sum(-2) / present.sum(-2).clamp(min=1)
        return self.classifier(torch.relu(self.hidden(mean)))


class LSTM(nn.Module):
    """Long short-term memory from a zero state: [B, T, num_inputs] -> the states [B, T, hidden].

    Unlike ``nn.LSTM`` it can be vectorised over members and has one bias, [4 hidden]; the gates are in
    its order: input, forget, cell, output. One is added to the forget gate, so that it starts open.
    """

    def __init__(self, num_inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_input = nn.Parameter(torch.empty(4 * hidden, num_inputs))
        self.weight_hidden = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # The two matrices act as one on the input and the state side by side: they share its fan-in.
        std = (self.weight_input.shape[1] + self.weight_hidden.shape[1]) ** -0.5
        truncated_normal_(self.weight_input, std)
        truncated_normal_(self.weight_hidden, std)
        nn.init.zeros_(self.bias)

    def forward(self, sequences: Tensor) -> Tensor:
        projected = F.linear(sequences, self.weight_input, self.bias)
        state = cell = projected.new_zeros(projected.shape[0], self.weight_hidden.shape[1])
        states = []
        for step in projected.unbind(1):
            gates = step + F.linear(state, self.weight_hidden)
            enter, forget, content, leave = gates.chunk(4, -1)
            cell = torch.sigmoid(forget + 1) * cell + torch.sigmoid(enter) * torch.tanh(content)
            state = torch.sigmoid(leave) * torch.tanh(cell)
            states.append(state)
        return torch.stack(states, 1)


class CNNLSTM(nn.Module):
    """Embeddings, one convolution of width 5, max-pooling by 4, an LSTM, one linear layer.

    The network of Delaunoy and Louppe (2021) for texts: 2,700,098 parameters for 20,000 words and two
    classes. Padding (token 0) is a word like any other.
    """

    def __init__(
        self,
        num_outputs: int = 2,
        vocabulary: int = 20_000,
        width: int = 128,
        channels: int = 64,
        hidden: int = 128,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.conv = nn.Conv1d(width, channels, 5)
        self.lstm = LSTM(channels, hidden)
        self.classifier = nn.Linear(hidden, num_outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise(self)
        self.lstm.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        # As images of one row: the numbers of a word lie side by side, which is what fast convolutions of
        # images want (channels_last), while those of sequences would copy everything.
        images = self.embedding(tokens).transpose(-2, -1).unsqueeze(-2)
        convolved = F.conv2d(images, self.conv.weight.unsqueeze(-2), self.conv.bias)
        pooled = F.max_pool2d(F.relu(convolved), (1, 4)).squeeze(-2)
        return self.classifier(self.lstm(pooled.transpose(-2, -1))[:, -1])


class CharacterLSTM(nn.Module):
    """Embeddings, an LSTM, one linear layer: symbols [B, T] -> logits [B, T, num_outputs] of the next ones.

    1,556,730 parameters for 205 symbols (von Oswald et al. 2021, who do not state their embeddings; 205 fit
    their count). The recurrent matrix is ``lstm.weight_hidden``. initial_range: all weights and biases start
    uniform within ±initial_range (0.01 in theirs); where not given, as those of ``CNNLSTM``.
    """

    def __init__(
        self,
        num_outputs: int = 205,
        width: int = 205,
        hidden: int = 500,
        initial_range: float | None = None,
    ) -> None:
        super().__init__()
        self.initial_range = (
            None if initial_range is None else require_positive("initial_range", initial_range)
        )
        self.embedding = nn.Embedding(num_outputs, width)
        self.lstm = LSTM(width, hidden)
        self.classifier = nn.Linear(hidden, num_outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.initial_range is None:
            initialise(self)
            self.lstm.reset_parameters()
            return
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -self.initial_range, self.initial_range)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.lstm(self.embedding(tokens)))
